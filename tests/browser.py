"""A real Chromium for tests, without any package: the DevTools protocol over two pipes."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page in a headless Chromium; what it prints to its console is kept."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        # Chromium reads from descriptor 3 and writes to 4; ours are moved out of the way first.
        theirs_in, self._out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in os.pipe())
        self._in, theirs_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in os.pipe())

        def connect() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=connect,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self, patience: float = 120) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], patience)
            assert ready, "Chromium does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "Chromium is gone"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._listen(message.get("method", ""), message.get("params", {}))
        return message

    def _listen(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["args"])[:500])
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def open(self, path: Path, ready: str = "true") -> None:
        """Loads a file and waits until it is ready."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(f"location.protocol === 'file:' && document.readyState === 'complete' && ({ready})")

    def wait(self, condition: str, patience: float = 120) -> None:
        """Until an expression is true."""
        end = time.monotonic() + patience
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.complaints)
            time.sleep(0.05)

    def size(self, width: int, height: int) -> None:
        """Of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def media(self, kind: str = "screen", scheme: str = "light") -> None:
        """Pretends to be a screen or paper, in a light or dark surrounding."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def press(self, key: str, code: int) -> None:
        """A key of the keyboard."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def point(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, *, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """The page as a PNG file."""
        options: dict[str, Any] = {"clip": {**clip, "scale": 1}} if clip else {}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **options)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def close(self) -> None:
        """Ends the browser."""
        self._session = ""
        try:
            self.call("Browser.close")
        finally:
            os.close(self._out)
            os.close(self._in)
            self._process.wait(20)
