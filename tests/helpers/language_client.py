"""A client of the language server that a test scripts."""
import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

_TIMEOUT = 300  # seconds until a message counts as lost; the first check imports torch


class Client:
    """Starts the language server and exchanges messages with it.

    Args:
        folder: root of the workspace.
        options: options of ``alfx lsp``.
    """

    def __init__(self, folder: Path, *options: str):
        self._process = subprocess.Popen([sys.executable, '-m', 'alfx.bin.lsp', *options], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._received: Queue = Queue()
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.capabilities = self.ask('initialize', {'processId': None, 'rootUri': folder.as_uri(), 'capabilities': {}})[
            'capabilities']
        self.tell('initialized', {})

    def tell(self, method: str, params: dict) -> None:
        """Send a notification."""
        self._send({'method': method, 'params': params})

    def ask(self, method: str, params: Any) -> Any:
        """Send a request and return the result."""
        self._number += 1
        self._send({'id': self._number, 'method': method, 'params': params})
        while (message := self._next()).get('id') != self._number:
            pass
        assert 'error' not in message, message
        return message['result']

    def diagnostics(self, uri: str, version: int) -> list[dict]:
        """Wait for the diagnostics of a version of a document."""
        while True:
            message = self._next()
            params = message.get('params', {})
            if message.get('method') == 'textDocument/publishDiagnostics' and params['uri'] == uri and \
                    params.get('version') == version:
                return params['diagnostics']

    def close(self) -> int:
        """End the server as editors do and return its exit code."""
        self.ask('shutdown', None)
        self.tell('exit', {})
        return self._process.wait(_TIMEOUT)

    def kill(self) -> None:
        """End the server if it still runs."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict) -> None:
        body = json.dumps({'jsonrpc': '2.0', **message}).encode()
        self._process.stdin.write(b'Content-Length: %d\r\n\r\n%b' % (len(body), body))
        self._process.stdin.flush()

    def _next(self) -> dict:
        message = self._received.get(timeout=_TIMEOUT)
        assert message is not None, 'the server has ended'
        return message

    def _read(self) -> None:
        output = self._process.stdout
        while header := output.readline():
            length = int(header.decode().removeprefix('Content-Length:'))
            while output.readline().strip():
                pass
            self._received.put(json.loads(output.read(length)))
        self._received.put(None)
