"""Takes the dashboard's pictures in docs/images: a real server on pocket, eight clients, and a chat, in a browser.

    .venv/bin/python tests/gateway/take_pictures.py [DIR]

Needs Chromium and the engine; takes a minute or two. Pictures have 200 colours, to stay small.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
from browser import Page, browsing
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "pocket" / "checkpoint"
MODEL = "pocket"
NUM_CLIENTS = 8
LOAD_S = 40.0
_LONGEST_WAIT_S = 120.0
_QUESTIONS = (
    "Count from 1 to 40.",
    "Count from 10 to 60.",
    "What is 17 + 25?",
    "What is 40 + 41?",
    "What is the capital of France?",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@asynccontextmanager
async def pocket_server() -> AsyncIterator[str]:
    """`deskfleet serve` in a process of its own, two ranks and drafts. Yields its URL."""
    command = (
        "import sys; from deskfleet.cli import main; sys.exit(main(sys.argv[1:]))",
        "serve", str(POCKET), "--tp", "2", "--port", "0", "--json", "--speculate", "3", "--max-num-seqs", "6",
        "--served-model-name", MODEL,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S):
            ready = json.loads(await process.stdout.readline())
        yield ready["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[None]:
    """Clients that ask one question after another for as long as the block runs."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:

        async def ask_on(number: int) -> None:
            choose = random.Random(number)
            while True:
                thinking = {"thinking": {"type": choose.choice(("enabled", "disabled"))}}
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": choose.choice(_QUESTIONS)}],
                    stream=True,
                    max_tokens=choose.choice((40, 120, 250)),
                    extra_body=thinking,
                )
                async for _ in stream:
                    pass
                await asyncio.sleep(choose.random())

        tasks = [asyncio.ensure_future(ask_on(number)) for number in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def two_shapes(path: Path) -> Path:
    """A picture that pocket has words for."""
    image = Image.new("RGB", (126, 126), "white")
    canvas = ImageDraw.Draw(image)
    canvas.ellipse((10, 10, 56, 56), fill=(40, 80, 210))
    canvas.rectangle((74, 74, 112, 112), fill=(214, 40, 40))
    image.save(path)
    return path


async def ask(page: Page, text: str, number: int) -> None:
    """Type a message, send it, and wait for answer `number` to be complete."""
    await page.type("#message", text)
    await page.press("Enter", 13)
    await page.until(
        f"document.querySelectorAll('.turn.assistant').length === {number} "
        "&& !document.querySelector('#send').disabled",
        within_s=_LONGEST_WAIT_S,
    )


async def save(page: Page, path: Path) -> None:
    """Take the picture with few colours: text stays sharp, and the file small."""
    await page.picture(path)
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        image.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)


async def take(directory: Path, *, load_s: float = LOAD_S) -> list[Path]:
    """Take both pictures and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    light, dark = directory / "dashboard-light.png", directory / "dashboard-dark.png"
    shapes = two_shapes(directory / "shapes.png")
    try:
        async with pocket_server() as url, loaded(url), browsing() as page:
            await page.open(f"{url}/ui/", width=1440, height=960)
            await page.run("document.querySelector('#thinking').value = 'enabled'")
            await asyncio.sleep(load_s)
            await ask(page, "Count from 1 to 20.", 1)
            await page.run("document.querySelector('.turn.assistant details').open = true")
            await page.run("document.activeElement.blur()")
            await save(page, light)

            await page.click("#new")
            await page.run("document.querySelector('#thinking').value = 'disabled'")
            await page.upload("#file", shapes)
            await page.until("document.querySelectorAll('#images img').length === 1")
            await ask(page, "Describe the picture.", 1)
            await page.run(
                f"document.querySelector('#tool-list').value = {json.dumps(json.dumps([TOOL]))};"
                "document.querySelector('#thinking').value = 'enabled'"
            )
            await ask(page, "What is the weather in Paris?", 2)
            await page.run(
                "(t => { t.value = 'dark'; t.dispatchEvent(new Event('change')); })(document.querySelector('#theme'));"
                "document.querySelectorAll('.turn.assistant details').forEach((e) => { e.open = !e.hidden; });"
                "document.querySelector('#log').scrollTop = 0; document.activeElement.blur()"
            )
            await asyncio.sleep(1.5)
            await save(page, dark)
            assert page.errors == [], page.errors
    finally:
        shapes.unlink()
    return [light, dark]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for picture in asyncio.run(take(target)):
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
