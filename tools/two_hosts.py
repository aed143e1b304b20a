"""Run a script under torchrun on two hosts: network namespaces of this machine, joined by a link.

    python tools/two_hosts.py examples/shard_your_module.py
    python tools/two_hosts.py --nproc-per-node 4 --mbit 100 -m tests.two_hosts_jobs train

The hosts have names, process numbers, mounts and addresses of their own (10.77.0.1 and 10.77.0.2, interface eth0);
the ranks of both share the files and the processors of this machine. Lines of output begin with the host's number. The
exit status is 0 if torchrun ended so on both hosts; after the first failure the other host has 30 seconds to end. At
the end the bytes that crossed the link are printed, headers included.

Root is not needed. Everything runs in one process namespace, which ends with this process.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from math import inf
from time import monotonic, sleep

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500  # free: nothing else listens in these namespaces
LINK = "eth0"
GRACE_SECONDS = 30.0  # from a failure on one host to the end of the other
OUTER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
HOST = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The shell stays the first process of its host: the host ends with torchrun, whatever ended that.
START = (
    'hostname "$1" && ip link set lo up && echo && read -r _ && ip addr add "$2/24" dev eth0 && ip link set eth0 up '
    '|| exit; shift 2; GLOO_SOCKET_IFNAME=eth0 "$@"; exit "$?"'
)
LIMIT = "tbf rate {}mbit burst 256kbit latency 400ms"


def can_run() -> bool:
    """Whether this machine lets its user make two hosts; it does not in many containers."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = "ip link add eth0 type veth peer name other && hostname trial"
    command = [*OUTER, *HOST, "sh", "-c", trial]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Run everything in a process namespace, and end that on Ctrl-C or SIGTERM."""
    lifeline, held = os.pipe()
    inner = [sys.executable, __file__, "--lifeline", str(lifeline), *arguments]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    process = subprocess.Popen([*OUTER, *inner], pass_fds=[lifeline], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        os.close(held)
        process.wait()


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/two_hosts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks of each host")
    parser.add_argument("--mbit", type=float, help="megabits a second of the link, in each direction")
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_const", const="-m", help="the script is a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args(arguments)


def run_hosts(given: argparse.Namespace) -> int:
    """As the first process of a process namespace: all others end with this one."""
    threading.Thread(target=_end_with_outer_process, args=(given.lifeline,), daemon=True).start()
    hosts = [Host(index, given) for index in range(2)]
    for host in hosts:
        host.wait_until_made()
    # Both ends are made inside the first host, so that this process needs no network of its own.
    hosts[0].inside("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(hosts[1].process.pid))
    for host in hosts:
        if given.mbit:
            host.inside("tc", "qdisc", "add", "dev", LINK, "root", *LIMIT.format(given.mbit).split())
        host.start()
    codes = _wait_for(hosts)
    first, second = hosts[0].received_bytes(), hosts[1].received_bytes()
    print(f"link: {second:,} bytes from host 0 to host 1, {first:,} bytes from host 1 to host 0", flush=True)
    return next((code % 256 for code in codes if code), 0)


def _end_with_outer_process(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


class Host:
    """One host: a shell in namespaces of its own, which becomes torchrun."""

    def __init__(self, index: int, given: argparse.Namespace) -> None:
        self.index = index
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
        torchrun += ["--nproc-per-node", str(given.nproc_per_node)]
        torchrun += [
            "--master-addr",
            ADDRESSES[0],
            "--master-port",
            str(PORT),
            *filter(None, [given.module]),
            given.script,
            *given.args,
        ]
        self.process = subprocess.Popen(
            [*HOST, "sh", "-c", START, "sh", f"host{index}", ADDRESSES[index], *torchrun],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.printer = threading.Thread(target=self._print, daemon=True)

    def wait_until_made(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"\n":
            raise SystemExit(f"Host {self.index} could not be made. Fix: look at the lines above.")
        # An open namespace keeps its counters after the end of its processes.
        self.network = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()
        self.printer.start()

    def inside(self, *command: str) -> str:
        """Run a command in the network of this host; its output."""
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.network}"]
        return subprocess.run([*enter, *command], stdout=subprocess.PIPE, text=True, check=True).stdout

    def received_bytes(self) -> int:
        lines = self.inside("cat", "/proc/self/net/dev").splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == f"{LINK}:")

    def _print(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                sys.stdout.buffer.write(b"[%d] %s" % (self.index, line))
                sys.stdout.buffer.flush()
        except BrokenPipeError:  # nobody reads, and the pipe to this process would fill
            os._exit(1)


def _wait_for(hosts: Sequence[Host]) -> list[int]:
    """Exit codes of both hosts; one that does not end after the other failed is ended."""
    deadline = inf
    while any(host.process.poll() is None for host in hosts) and monotonic() < deadline:
        sleep(0.1)
        if any(host.process.poll() for host in hosts):
            deadline = min(deadline, monotonic() + GRACE_SECONDS)
    for host in hosts:
        host.process.kill()
    codes = [host.process.wait() for host in hosts]
    for host in hosts:
        host.printer.join()
    return codes


if __name__ == "__main__":
    given = options(sys.argv[1:])
    sys.exit(main(sys.argv[1:]) if given.lifeline is None else run_hosts(given))
