"""Answers lookups in one embedding table over HTTP: of a checkpoint it reads that table and nothing else.

    python examples/embedding_server.py runs/1 model.items --port 8000
    curl 'localhost:8000/lookup?ids=3,999'

Without arguments it saves a checkpoint of two tables, of which one is sharded on three simulated ranks, serves that
one, and asks:

    python examples/embedding_server.py

prints

    / 200 {"table": "model.items", "rows": 1000, "columns": 2, "step": 7}
    /lookup?ids=3,999 200 {"rows": [[6.0, 7.0], [1998.0, 1999.0]]}
    /lookup?ids=3,1000 400 {"error": "'1000' is not an id of this table. Its ids are 0 to 999."}
    /lookup?ids=x 400 {"error": "'x' is not an id of this table. Its ids are 0 to 999."}
    /tables 404 {"error": "There is no /tables. Ask for / or /lookup?ids=0,1."}
"""

import argparse
import json
import tempfile
import threading
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import latest, load, read_manifest, save
from shardwise.testing import world


def read_table(checkpoint: str, name: str) -> tuple[Tensor, int]:
    """One table of a checkpoint, or of the latest one in a folder, and the step at which it was saved.

    Raises:
        CheckpointError: it is damaged.
        KeyError: it has no table of that name.
    """
    manifest = read_manifest(latest(checkpoint) or checkpoint)
    tables = {key: tensor for key, tensor in manifest.tensors.items() if len(tensor.shape) == 2}
    if name not in tables:
        raise KeyError(f"{checkpoint} has no table {name!r}; it has {', '.join(tables)}")
    table = torch.empty(tables[name].shape, dtype=tables[name].dtype)
    load(checkpoint, {name: table}, subset=True)  # verifies what it reads
    return table, manifest.step


def lookup(table: Tensor, ids: str) -> list[list[float]]:
    """The rows of some ids, such as "3,999".

    Raises:
        ValueError: what is not an id of the table; nothing was looked up.
    """
    found = []
    for text in ids.split(","):
        if not text.isdecimal() or int(text) >= len(table):
            raise ValueError(f"{text!r} is not an id of this table. Its ids are 0 to {len(table) - 1}.")
        found.append(int(text))
    rows: list[list[float]] = table[torch.tensor(found)].tolist()
    return rows


def server(table: Tensor, name: str, step: int, port: int) -> ThreadingHTTPServer:
    """A server on this machine; port 0 takes a free one. `serve_forever` starts it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            ids = parse_qs(url.query).get("ids")
            if url.path == "/":
                shape = dict(zip(("rows", "columns"), table.shape, strict=True))
                self.answer(200, {"table": name, **shape, "step": step})
            elif url.path != "/lookup":
                self.answer(404, {"error": f"There is no {url.path}. Ask for / or /lookup?ids=0,1."})
            elif ids is None:
                self.answer(400, {"error": "No ids. Ask for /lookup?ids=0,1."})
            else:
                try:
                    self.answer(200, {"rows": lookup(table, ids[0])})
                except ValueError as error:
                    self.answer(400, {"error": str(error)})

        def answer(self, status: int, body: dict[str, object]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def demo() -> None:
    """What the top of this file shows."""

    def save_sharded(folder: str) -> None:
        items = sw.distribute_tensor(torch.arange(2000.0).view(1000, 2), placements=[sw.Shard(0)])
        save(folder, {"model": {"items": items, "shops": torch.zeros(50, 4)}}, step=7)

    name = "model.items"
    with tempfile.TemporaryDirectory() as folder:
        world(3).run(save_sharded, folder)
        table, step = read_table(folder, name)
    with server(table, name, step, port=0) as serving:
        threading.Thread(target=serving.serve_forever).start()
        for path in ("/", "/lookup?ids=3,999", "/lookup?ids=3,1000", "/lookup?ids=x", "/tables"):
            print(path, *asked(serving.server_port, path))
        serving.shutdown()


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer."""
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Lookups in a table of a checkpoint, over HTTP.")
    parser.add_argument("checkpoint", nargs="?", help="folder or URL; without it, a demonstration")
    parser.add_argument("table", nargs="?", help="name of the tensor; `shardwise checkpoint inspect` lists them")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.table is None:
        demo()
        return
    table, step = read_table(args.checkpoint, args.table)
    print(f"Serving {args.table} of step {step} on http://127.0.0.1:{args.port}", flush=True)
    server(table, args.table, step, args.port).serve_forever()


if __name__ == "__main__":
    main()
