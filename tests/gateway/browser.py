"""A headless Chromium that tests drive over its DevTools protocol: pages, scripts in them, pictures of them.

Nothing is installed here. `find_chromium` says where one is, and tests skip, with the reason, where there is none.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_CHROMIUM = "no Chromium is installed (on Debian: apt-get install chromium)"
_START_S = 30.0


def find_chromium() -> str | None:
    """Path of an installed Chromium; DESKFLEET has no say in it, PATH has."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `requested` are all URLs it has asked for, `errors` what went wrong in its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self.requested: list[str] = []
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one DevTools method."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(30):
            return await answer

    async def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> Self:
        """Load `url` in a window of that size."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")
        await self.size(width, height)
        scheme = "dark" if dark else "light"
        await self.send(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")
        return self

    async def size(self, width: int, height: int) -> None:
        """Give the window another size."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise. Raises AssertionError with the page's exception."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str, *, within_s: float = 15) -> Any:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(within_s):
                while not (value := await self.run(condition)):
                    await asyncio.sleep(0.05)
                return value
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"not within {within_s} s: {condition}; the page says:\n{text}") from None

    async def text(self, selector: str) -> str:
        """What an element shows."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field, empty it, and type as a keyboard would."""
        await self.run(
            f"(e => {{ e.focus(); e.value = ''; }})(document.querySelector({json.dumps(selector)}))"
        )
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text="\r" if kind == "char" else "",
            )

    async def click(self, selector: str) -> None:
        """Click in the middle of an element, wherever that is."""
        x, y = await self.run(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def upload(self, selector: str, *paths: Path) -> None:
        """Choose files in a file input."""
        document = await self.send("DOM.getDocument")
        node = await self.send("DOM.querySelector", nodeId=document["root"]["nodeId"], selector=selector)
        await self.send("DOM.setFileInputFiles", files=[str(path) for path in paths], nodeId=node["nodeId"])

    async def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        """Stop listening."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(AssertionError(f"DevTools: {data['error']}"))
                else:
                    answer.set_result(data["result"])
            elif data["method"] == "Network.requestWillBeSent":
                self.requested.append(data["params"]["request"]["url"])
            elif data["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(data["params"]["exceptionDetails"])[:500])
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                entry = data["params"]["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """One tab of a Chromium of our own, which leaves nothing behind."""
    path = find_chromium()
    assert path is not None, NO_CHROMIUM
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run",
            "--disable-gpu", "--hide-scrollbars", "--disable-background-networking", "--disable-sync",
            "--disable-component-update", "--no-default-browser-check", "--force-color-profile=srgb",
            "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = await response.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                page = Page(await session.ws_connect(address, max_msg_size=0))
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _port(profile: Path, process: asyncio.subprocess.Process) -> int:
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(_START_S):
        while not (file.exists() and file.read_text().strip()):
            assert process.returncode is None, f"Chromium ended at once with {process.returncode}"
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
