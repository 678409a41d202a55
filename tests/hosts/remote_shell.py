"""A remote shell between two namespaces, in the place of ssh: `remote_shell.py serve ADDRESS`, `… HOST COMMAND…`.

Like ssh it crosses the network, drops options before the host, ends with the command's status, and with 255 when the
host does not answer. Like sshd it starts commands with an environment of its own.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading

PORT = 2022
HEAD = struct.Struct("!BI")  # kind (1 and 2: output, 0: exit status), length or status
ENVIRON = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/"}


def serve(address: str) -> None:
    with socket.create_server((address, PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=run, args=(connection,), daemon=True).start()


def run(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        command = lines.readline().decode()
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRON,
            cwd="/",
        )
        lock = threading.Lock()

        def relay(kind: int, pipe) -> None:
            while data := pipe.read1(1 << 16):
                with lock:
                    connection.sendall(HEAD.pack(kind, len(data)) + data)

        relays = [threading.Thread(target=relay, args=pair) for pair in ((1, child.stdout), (2, child.stderr))]
        for thread in relays:
            thread.start()
        for thread in relays:
            thread.join()
        connection.sendall(HEAD.pack(0, child.wait() & 0xFF))


def call(words: list[str]) -> int:
    while words and words[0].startswith("-"):
        del words[0]
    host, *command = words
    try:
        connection = socket.create_connection((host, PORT), timeout=3)
    except OSError as error:
        print(f"connect to host {host} port {PORT}: {error.strerror or error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    with connection, connection.makefile("rb") as answer:
        connection.sendall(" ".join(command).replace("\n", " ").encode() + b"\n")
        while len(head := answer.read(HEAD.size)) == HEAD.size:
            kind, length = HEAD.unpack(head)
            if kind == 0:
                return int(length)
            stream = sys.stdout if kind == 1 else sys.stderr
            stream.buffer.write(answer.read(length))
            stream.flush()
    return 255


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1:]))
