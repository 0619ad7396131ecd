"""Text of the running interpreter: documentation and source files of Python's standard library (PSF licence).

Owns which files are read and how they are cut. What comes out depends on the
interpreter's version: it enriches the training, but nothing that must be reproduced byte for byte (tokenizer,
evaluation) rests on it.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from functools import cache
from pathlib import Path

from pocket.data.words import word_list

_MODULES = word_list(
    "abc argparse ast asyncio/base_events asyncio/locks asyncio/queues asyncio/streams asyncio/tasks base64 bisect "
    "calendar cmd code codecs collections/__init__ configparser contextlib copy csv dataclasses datetime difflib "
    "enum email/message email/utils filecmp fileinput fnmatch fractions functools genericpath getopt getpass glob "
    "gzip heapq hashlib html/parser http/client http/cookies http/server imaplib importlib/util inspect io "
    "ipaddress json/decoder json/encoder keyword linecache locale logging/__init__ logging/handlers mailbox "
    "mimetypes ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib "
    "posixpath pprint profile pstats queue quopri random reprlib sched secrets selectors shelve shlex shutil signal "
    "smtplib socket socketserver sqlite3/dbapi2 ssl stat statistics string struct subprocess symtable tabnanny "
    "tarfile tempfile textwrap threading timeit token tokenize trace traceback types typing unittest/case "
    "unittest/mock unittest/suite urllib/parse urllib/request uuid warnings wave weakref webbrowser xml/dom/minidom "
    "zipapp zipfile zoneinfo/_common"
)

_SPECIAL = re.compile(r"<[|｜]|[|｜]>|｜|<think>|</think>")
_COPYRIGHT = re.compile(r"(?i)\bcopyright\b.*\d{4}")
_FOUNDATION = (
    "Python Software Foundation"  # a file that names another holder may have other terms: it is left out
)
_MIN_CHARS = 60


@cache
def _files() -> tuple[str, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in _MODULES:
        path = root / f"{name}.py"
        if not path.exists():  # modules come and go between versions
            continue
        text = path.read_text(encoding="utf-8")
        if all(_FOUNDATION in line for line in text.splitlines() if _COPYRIGHT.search(line)):
            texts.append(text)
    return tuple(texts)


@cache
def documentation() -> tuple[str, ...]:
    """Return paragraphs of prose: docstrings of the modules above and the language reference topics."""
    from pydoc_data import topics

    out = []
    for text in _files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                doc := ast.get_docstring(node)
            ):
                out += doc.split("\n\n")
    for topic in sorted(topics.topics):
        out += topics.topics[topic].split("\n\n")
    return tuple(text for paragraph in out if _usable(text := paragraph.strip("\n")))


@cache
def source_blocks() -> tuple[str, ...]:
    """Return top-level functions and classes, and long methods' neighbourhoods, as they are in the files."""
    out = []
    for text in _files():
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None:
                block = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if _usable(block):
                    out.append(block)
    return tuple(out)


def _usable(text: str) -> bool:
    return len(text) >= _MIN_CHARS and text.isascii() and not _SPECIAL.search(text)
