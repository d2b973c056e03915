"""A headless Chromium, spoken to through pipes: pages are opened, clicked at, asked, pictured."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "chromium"]

_PATIENCE = 60.0


def chromium() -> str | None:
    """Where a Chromium is, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page; a context manager.

    Attributes:
        problems: What the console has said of errors, exceptions and refused content, and every request but for the
            page itself.
    """

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-")
        self._number, self._buffer, self._page = 0, b"", ""
        hear, self._ask = os.pipe()
        self._hear, say = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        quiet = ["--disable-extensions", "--disable-background-networking", "--disable-component-update"]

        def own_pipes() -> None:  # the protocol's are 3 and 4
            os.dup2(hear, 103)
            os.dup2(say, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            [program, *flags, *quiet, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=own_pipes,
        )
        os.close(hear)
        os.close(say)

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._page = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ask)
        os.close(self._hear)
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Ask the browser for something; returns its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._page:
            message["sessionId"] = self._page
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._ask, data) :]
        deadline = time.monotonic() + _PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._hear], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._hear, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif kind == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {params['args']}")
        elif kind == "Log.entryAdded":
            self.problems.append(f"log: {params['entry']['text']}")
        elif kind == "Network.requestWillBeSent" and params["type"] != "Document":
            self.problems.append(f"request: {params['request']['url']}")
        elif kind == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params['message']}")

    def look(self, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and the colours that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> float:
        """Open a page and wait until it has drawn itself; returns after how many seconds it had, as it says itself."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            drawn = self.evaluate(
                "location.protocol === 'file:' && document.readyState === 'complete' && "
                "(document.documentElement.dataset.drawn || (document.querySelector('#tiles div') && 'failed'))"
            )
            if drawn and drawn != "failed":
                return float(drawn) / 1000
            if self.problems:
                break
            time.sleep(0.05)
        raise AssertionError(f"the page has not drawn itself: {self.problems}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Click at the middle of an element with the mouse."""
        place = json.loads(
            self.evaluate(
                f"(() => {{ const node = document.querySelector({json.dumps(selector)}); "
                "node.scrollIntoView({block: 'center', behavior: 'instant'}); const b = node.getBoundingClientRect(); "
                "return JSON.stringify([b.x + b.width / 2, b.y + b.height / 2]); })()"
            )
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": place[0], "y": place[1]}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str) -> None:
        """Press a key such as ``Tab``, ``Enter`` or ``ArrowDown``."""
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a picture of the page as PNG."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300))))"
        )
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
