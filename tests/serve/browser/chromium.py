"""Client of Chromium's DevTools protocol, over a pipe: pages, keys, clicks and what a page says.

A small part of what Playwright does, which would add 168 MB and three packages to the tests, and
a browser of its own that fits its version.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT_S = 60.0
_PAUSE_S = 0.02
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    # Another name of this machine, as a site has it that rebinds its own.
    "--host-resolver-rules=MAP rebound.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, "
    "EXCLUDE localhost",
)
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Space": (32, " "),
    "ArrowDown": (40, ""),
    "ArrowRight": (39, ""),
}
"""Codes of keys as Windows has them, and the text that they enter."""
_SHIFT = 8


class Chromium:
    """A browser without a window, which ends with the block, or with this process."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = itertools.count(1)
        self._tabs: dict[str, Tab] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._unread = bytearray()

    def __enter__(self) -> Chromium:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._log = (Path(self._profile.name) / "log").open("w+b")
        flags = (*_FLAGS, f"--user-data-dir={self._profile.name}")
        if os.geteuid() == 0:
            flags = (*flags, "--no-sandbox")
        # The protocol is spoken on descriptors 3 and 4.
        script = 'exec 3<&0 4>&1 </dev/null >&2; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", script, self._program, *flags, "about:blank"],
            env={**os.environ, "HOME": self._profile.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        return self

    @property
    def pid(self) -> int:
        """Number of its first process, which starts the others."""
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._profile.cleanup()

    @contextmanager
    def tab(
        self, *, width: int = 1200, height: int = 900, dark: bool = False, ratio: float = 1
    ) -> Iterator[Tab]:
        """Open an empty page that shares nothing, such as cookies; closed at the end."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        tab.looks(width=width, height=height, dark=dark, ratio=ratio)
        try:
            yield tab
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def send(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        deadline = time.monotonic() + WAIT_S
        while number not in self._replies:
            self.listen(deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer to {method} {params} within {WAIT_S:.0f} s")
        reply = self._replies.pop(number)
        if "error" in reply:
            raise Failed(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    def listen(self, within_s: float) -> None:
        """Take in what the browser says, once it says something."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], max(0.0, within_s))[0]:
            return
        data = os.read(output.fileno(), 1 << 16)
        if not data:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"{self._program} ended: {self._process.wait(10)}\n{said[-2000:]}")
        self._unread += data
        *whole, rest = bytes(self._unread).split(b"\0")
        self._unread = bytearray(rest)
        for text in whole:
            self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._replies[message["id"]] = message
        elif message.get("sessionId") in self._tabs:
            self._tabs[message["sessionId"]].take(message["method"], message["params"])


class Failed(Exception):
    """The browser refuses a call, or a script has thrown."""


@dataclass(slots=True)
class Tab:
    """A page, as a person with a keyboard and a mouse has it."""

    _browser: Chromium
    _session: str
    said: list[str] = field(default_factory=list)
    """Messages of the console, also those about what its policy forbids, and uncaught errors."""
    asked: list[str] = field(default_factory=list)
    """URLs that were asked for."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Statuses of the answers, by URL."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.send(method, session=self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Note an event."""
        if method == "Runtime.consoleAPICalled":
            texts = [str(one.get("value", one.get("description"))) for one in params["args"]]
            self.said.append(f"{params['type']}: {' '.join(texts)}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.said.append(f"uncaught: {details['text']} {thrown}")
        elif method == "Log.entryAdded":
            entry = params["entry"]
            self.said.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Network.responseReceived":
            self.statuses[params["response"]["url"]] = params["response"]["status"]

    def looks(self, *, width: int, height: int, dark: bool, ratio: float = 1) -> None:
        """Give the window a size, and the person a preference."""
        size = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it has loaded."""
        gone = self.send("Page.navigate", url=url)
        if "errorText" in gone:
            raise Failed(f"{url}: {gone['errorText']}")
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str, *values: Any) -> Any:
        """Run the body of a function in the page, whose arguments are `a`; return what it returns.

        Raises:
            Failed: it throws, or the page goes away meanwhile.
        """
        text = f"(async a => {{ {script} }})({json.dumps(values)})"
        found = self.send(
            "Runtime.evaluate", expression=text, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise Failed(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait_for(self, condition: str, *values: Any) -> None:
        """Wait until an expression is true. `a` is the list of the values."""
        deadline = time.monotonic() + WAIT_S
        found: object = None
        while time.monotonic() < deadline:
            try:
                if self.run(f"return !!({condition});", *values):
                    return
                found = self.run("return document.body.innerText.slice(0, 3000)")
            except Failed as error:  # between two pages there is nothing to run it in
                found = error
            self._browser.listen(_PAUSE_S)
        raise AssertionError(f"never: {condition} {values}\n{found}")

    def wait_for_text(self, text: str, within: str = "body") -> None:
        """Wait until an element has a text."""
        has = "[...document.querySelectorAll(a[0])].some(one => one.innerText.includes(a[1]))"
        self.wait_for(has, within, text)

    def text(self, of: str = "body") -> str:
        """Return the text of an element, as a person sees it."""
        return str(self.run("return document.querySelector(a[0]).innerText", of))

    @property
    def url(self) -> str:
        """The address line."""
        return str(self.run("return location.href"))

    def press(self, key: str, *, shift: bool = False, times: int = 1) -> None:
        """Press a key."""
        code, text = _KEYS[key]
        name = " " if key == "Space" else key
        known = {"key": name, "code": key, "windowsVirtualKeyCode": code}
        known["modifiers"] = _SHIFT if shift else 0
        for _ in range(times):
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.send("Input.dispatchKeyEvent", **down, **known)
            self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def type(self, text: str) -> None:
        """Enter a text where the focus is."""
        self.send("Input.insertText", text=text)

    def focus(self, selector: str) -> None:
        """Put the focus on the first element that a CSS selector finds."""
        self.wait_for("document.querySelector(a[0])", selector)
        self.run("document.querySelector(a[0]).focus()", selector)

    def fill(self, selector: str, text: str) -> None:
        """Put a text in the place of what a field has."""
        self.focus(selector)
        self.run("document.querySelector(a[0]).select()", selector)
        self.type(text)

    def click(self, selector: str, text: str = "") -> None:
        """Click in the middle of the first element that a CSS selector finds, with some text."""
        x, y = self.middle(selector, text)
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", clickCount=1)
        self._mouse("mouseReleased", x, y, button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._mouse("mouseMoved", x, y)

    def middle(self, selector: str, text: str = "") -> tuple[float, float]:
        """Scroll an element into view; return where its middle is."""
        find = "[...document.querySelectorAll(a[0])].find(one => one.innerText.includes(a[1]))"
        self.wait_for(find, selector, text)
        scroll = (
            f"const one = {find}; one.scrollIntoView({{block: 'center', behavior: 'instant'}});"
        )
        rect = (
            "const r = one.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
        )
        x, y = self.run(scroll + rect, selector, text)
        return float(x), float(y)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, *, height: int | None = None) -> bytes:
        """Return a PNG of the page: of all of it, or of its upper end."""
        whole = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        size = {"width": whole[0], "height": min(height or whole[1], whole[1])}
        clip = {"x": 0, "y": 0, **size, "scale": 1}
        taken = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])
