"""Ctrl-C that lets the current update finish."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While entered, the first Ctrl-C only sets `requested`; the second one interrupts as usual."""

    def __init__(self):
        """Nothing is requested yet."""
        self.requested = False
        self._previous: object = None

    def __enter__(self) -> "Interrupts":
        """Takes over SIGINT, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives SIGINT back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
