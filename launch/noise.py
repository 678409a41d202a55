"""Taking mpirun's failure messages out of the ranks' output.

When a rank fails, its traceback says what happened; mpirun then adds twenty lines about process ids and signals.
Only text that has the exact shape of such a message, from its first line to its last, is taken out, and it is kept:
it is shown after all when no rank explained the failure. Everything else passes byte by byte, in order and at once.
"""

from __future__ import annotations

import time

from fuelrun.launch.engine import Banner

_PATIENCE_S = 0.25  # mpirun writes a message in one go; what stays unfinished for longer is somebody else's
_LONGEST = 60  # lines
# What every message has in its first or second line. Bytes without any of it are passed on unread.
_SIGNS = (b"-" * 74, b"=" * 60, b"Abort(", b"PMIX ERROR", b"[proxy:", b"[mpiexec@", b"plm:", b"*** An", b"\0")


class NoiseFilter:
    """One stream of a job: what is fed comes back, but for mpirun's messages, which end in `taken`."""

    def __init__(self, banners: tuple[Banner, ...]) -> None:
        self.taken: list[str] = []
        self._banners = banners
        self._held = b""  # lines that may turn out to be a message, and perhaps the beginning of one more line
        self._since = 0.0
        self._at_line_start = True

    @property
    def holding(self) -> bool:
        """True while something is kept back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the stream; return what is surely no message."""
        if not self._held:
            if not data.startswith(b"\n") and not data.endswith((b"\n\n", b"-", b"=")) and not _has_sign(data):
                self._at_line_start = data.endswith(b"\n")
                return data
            self._since = time.monotonic()
        passed = bytearray()
        rest, self._held = self._held + data, b""
        while rest:
            end, verdict = self._look(rest)
            if verdict == "wait":
                self._held = rest
                break
            if verdict == "take":
                self.taken.append(rest[:end].decode("utf-8", "replace").strip("\0"))
            else:
                passed += rest[:end]
                self._at_line_start = rest[:end].endswith(b"\n")
            rest = rest[end:]
        return bytes(passed)

    def overdue(self) -> bytes:
        """What has been kept back for too long, and passes now; to be called now and then."""
        if self._held and time.monotonic() - self._since > _PATIENCE_S:
            return self._release()
        return b""

    def end(self) -> bytes:
        """The stream is over: what was kept back, and passes now."""
        self._held = self._held.strip(b"\0")  # Open MPI puts one behind its last message
        return self._release()

    def _release(self) -> bytes:
        held, self._held = self._held, b""
        self._at_line_start = held.endswith(b"\n")
        return held

    def _look(self, data: bytes) -> tuple[int, str]:
        """What to do with the beginning of `data`: how many bytes, and "pass", "take" or "wait" for more."""
        first_end = data.find(b"\n") + 1 or len(data)
        if not self._at_line_start:
            return first_end, "pass"
        if data.startswith(b"\0"):
            return (1, "take") if len(data) > 1 else (1, "wait")
        verdict = (first_end, "pass")
        for banner in self._banners:
            end, found = _match(banner, data)
            if found == "take":
                return end, "take"
            if found == "wait":
                verdict = (end, "wait")
        return verdict


def _has_sign(data: bytes) -> bool:
    return any(sign in data for sign in _SIGNS)


def _match(banner: Banner, data: bytes) -> tuple[int, str]:
    """Does `data` begin with this message: "take" (up to where), "pass" (no), or "wait" (so far, yes)."""
    end = 0
    for number in range(_LONGEST):
        newline = data.find(b"\n", end)
        complete = newline >= 0
        line = data[end : newline if complete else len(data)].strip(b"\0").decode("utf-8", "replace")
        end = newline + 1 if complete else len(data)
        if number < len(banner.opening):
            if not complete:
                # A line that has only begun: a rule may still grow; of other lines too little is known to let go.
                ruled = not line.strip("-=") or number > 0 or line.startswith("Abort(")
                return end, "wait" if ruled and (line or number) else "pass"
            if not banner.opening[number].fullmatch(line):
                return end, "pass"
            if banner.closing is None and number == len(banner.opening) - 1:
                return end, "take"
        elif not complete:
            return end, "wait"
        elif banner.closing is not None and banner.closing.fullmatch(line):
            return end, "take"
    return end, "pass"
