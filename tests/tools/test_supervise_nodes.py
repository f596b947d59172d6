# SPDX-License-Identifier: Apache-2.0
"""Several supervisors on this host, each a node of one run: a node is lost, and what follows."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor import Supervisor, left, tensors

SECRET = "0123456789abcdef0123456789abcdef"
MODEL = (
    "pretrain_llama.py --mock-data --vocab-size 500 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --lr 1e-3 --log-interval 1 --num-workers 0 "
    "--device cpu --global-batch-size 4 --zero-stage 1 --peer-checkpoint 5"
)


class Nodes:
    """One run on several supervisors of one rank each. Each has a folder."""

    def __init__(self, supervise: Callable[..., Supervisor], folder: Path, port: int) -> None:
        self.supervise, self.folder, self.port = supervise, folder, port
        self.log = folder / "log.jsonl"

    def start(
        self, count: int, flags: str, argv: Any = (), joined: Any = None, **more: Any
    ) -> list[Supervisor]:
        """Start so many supervisors, node 0 first, or those of the nodes `joined` alone."""
        self.flags = f"--nnodes {count} --master-addr 127.0.0.1 --master-port {self.port} {flags}"
        self.argv, self.more = argv, more
        return [self.join(node) for node in joined or range(count)]

    def join(self, node: int, folder: str = "", secret: str = SECRET) -> Supervisor:
        """Start one supervisor."""
        return self.supervise(
            f"{self.flags} --node-rank {node}", argv=self.argv,
            folder=self.folder / (folder or str(node)), WEFT_SECRET=secret, **self.more,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [row for row in rows if "loss" in row]

    def train(self, count: int, flags: str, steps: int) -> list[Supervisor]:
        """Start the trainer, to save at the end alone."""
        argv = [*MODEL.split(), "--train-iters", str(steps), "--save", f"{self.folder}/saved"]
        return self.start(count, flags, [*argv, "--log-json", str(self.log)])


@pytest.fixture
def nodes(
    supervise: Callable[..., Supervisor], tmp_path: Path, free_port: Callable[[], int]
) -> Nodes:
    return Nodes(supervise, tmp_path, free_port())


def lose(node: Supervisor) -> None:
    """Kill a supervisor and what started its ranks, which kills the ranks: the node is gone."""
    path = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children")
    for pid in [*map(int, path.read_text().split()), node.process.pid]:
        os.kill(pid, signal.SIGKILL)
    node.process.wait()


def test_a_spare_node_takes_the_place_of_a_lost_one(nodes: Nodes, tmp_path: Path) -> None:
    plan = {"0.0": "wait", "0.1": "wait", "step": 1}
    three = nodes.start(3, "--spares 1", plan=plan)
    three[1].until("0 1 2 ")
    lose(three[1])
    assert three[0].wait() == 0 and three[2].wait() == 0
    assert "rank 1 on node 1 failed after step 1: its node was lost" in three[0].said()
    assert [words[:3] for words in three[2].starts()] == [["1", "1", "2"]]


@pytest.mark.prove
def test_without_a_spare_the_run_waits_for_the_node_then_ends(nodes: Nodes) -> None:
    two = nodes.start(2, "--node-wait 1", plan={"": "wait"})
    two[1].until("0 1 2 ")
    lose(two[1])
    assert two[0].wait() == 1
    assert "1 of the 2 places for ranks are left; with --elastic-dp the run would continue" in (
        two[0].said()
    )


@pytest.mark.prove
def test_a_node_that_comes_back_is_taken(nodes: Nodes) -> None:
    two = nodes.start(2, "--node-wait 60", plan={"0.0": "wait", "0.1": "wait"})
    two[1].until("0 1 2 ")
    lose(two[1])
    back = nodes.join(1)
    assert two[0].wait() == 0 and back.wait() == 0
    assert [words[:2] for words in back.starts()] == [["1", "1"]]


def test_without_node_0_the_others_end_and_leave_nothing(nodes: Nodes) -> None:
    two = nodes.start(2, "--node-wait 1", plan={"": "wait"})
    two[1].until("0 1 2 ")
    lose(two[0])
    assert two[1].wait() == 1 and "node 0 is lost, so the ranks here are ended" in two[1].said()


def test_a_second_supervisor_of_a_node_is_told_and_the_first_stays(nodes: Nodes) -> None:
    two = nodes.start(2, "", plan={"": "wait"})
    two[1].until("0 1 2 ")
    second = nodes.join(1, "second")
    assert second.wait(30.0) == 2
    assert "node 0 refuses --node-rank 1" in second.said()
    assert "another process, at 127.0.0.1, is node 1 already" in second.said()
    third = nodes.join(0, "third")
    assert third.wait(30.0) == 2 and "--master-port" in third.said()
    two[0].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in two] == [75, 75]
    assert not two[0].rows("fault") and len(two[0].rows("start")) == 1


def test_another_secret_is_told_at_once_by_both_sides(nodes: Nodes) -> None:
    first = nodes.start(2, "", plan={"": 0}, joined=[0])[0]
    caller = nodes.join(1, "caller", SECRET + "!")
    assert caller.wait(30.0) == 2
    assert "node 0 refuses --node-rank 1" in caller.said()
    assert "it has another secret: all ranks of a run need the same WEFT_SECRET" in caller.said()
    first.until("127.0.0.1 connects with a different secret", seconds=1.0)
    right = nodes.join(1)
    assert first.wait() == 0 and right.wait() == 0


class Dripping(threading.Thread):
    """200 callers at a port. Each sends a byte every 2 s, and comes again if it is sent away."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.over, self.came = port, False, 0

    def run(self) -> None:
        held: list[socket.socket] = []
        while not self.over:
            held = [sock for sock in held if self.drips(sock)]
            for _ in range(200 - len(held)):
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", self.port), timeout=0.2))
                    held[-1].setblocking(False)
                    self.came += 1
            for _ in range(20):
                time.sleep(0.0 if self.over else 0.1)
        for sock in held:
            sock.close()

    def drips(self, sock: socket.socket) -> bool:
        """Send a byte; return whether the connection still stands."""
        try:
            with suppress(BlockingIOError):
                if not sock.recv(4096):
                    raise ConnectionError("sent away")
            sock.send(b"0")
            return True
        except OSError:
            sock.close()
            return False


@pytest.mark.prove
def test_two_hundred_strangers_that_drip_keep_no_node_away(nodes: Nodes) -> None:
    """They come before a node does, and stay as one is lost and comes back."""
    plan = {"0.0": "wait", "0.1": "wait", "step": 1}
    first = nodes.start(2, "--node-wait 20", plan=plan, joined=[0])[0]
    callers = Dripping(nodes.port)
    callers.start()
    try:
        deadline = time.monotonic() + 60
        while callers.came <= 200:
            assert time.monotonic() < deadline, "no caller was sent away"
            time.sleep(0.1)
        second = nodes.join(1)
        second.until("0 1 2 ", seconds=30.0)
        lose(second)
        back = nodes.join(1, "back")
        assert first.wait() == 0 and back.wait() == 0, first.said()
    finally:
        callers.over = True
        callers.join()
    assert [words[:2] for words in back.starts()] == [["1", "1"]]


def test_a_signal_to_one_node_ends_all(nodes: Nodes) -> None:
    two = nodes.start(2, "", plan={"": "wait"})
    for rank, node in enumerate(two):
        node.until(f"0 {rank} 2 ")
    two[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in two] == [75, 75]


@pytest.mark.prove
def test_a_lost_nodes_state_comes_from_its_peers_memory(
    nodes: Nodes, launcher: Any, tmp_path: Path
) -> None:
    steps = 150
    three = nodes.train(3, "--spares 1", steps)
    three[0].until(" 40/")
    lose(three[1])
    assert three[0].wait() == 0, three[0].said()
    assert three[2].wait() == 0
    (back,) = three[0].rows("back")
    # at step 40 or later; on busy cores the copies of some steps before may not have ended
    assert back["source"] == "memory" and back["begun_at"] >= 20
    oracle = launcher.run(
        2, [*MODEL.split()[1:-2], "--train-iters", str(steps), "--save", "{dir}/saved"]
    )
    assert tensors(tmp_path / "saved", steps) == tensors(oracle.folder / "saved", steps)


@pytest.mark.prove
def test_with_fewer_ranks_the_run_goes_on_from_memory(
    nodes: Nodes, launcher: Any, tmp_path: Path
) -> None:
    steps = 150
    two = nodes.train(2, "--elastic-dp --node-wait 1", steps)
    two[0].until(" 40/")
    lose(two[1])
    assert two[0].wait() == 0, two[0].said()
    assert two[0].rows("back")[0]["source"] == "memory"
    assert [row["world"] for row in two[0].rows("start")] == [2, 1]
    oracle = launcher.run(2, [*MODEL.split()[1:-2], "--train-iters", str(steps)])
    theirs = [row for row in oracle.rows() if "loss" in row]
    mine = {row["iteration"]: row for row in nodes.rows()}
    assert len(mine) == len(theirs) == steps
    for row in theirs:
        assert mine[row["iteration"]]["loss"] == pytest.approx(row["loss"], rel=1e-4)
        assert mine[row["iteration"]]["consumed_samples"] == row["consumed_samples"]


@pytest.mark.prove
def test_the_trainer_leaves_nothing_when_its_supervisor_is_killed(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    argv = [*MODEL.split(), "--train-iters", "1000000", "--save", f"{tmp_path}/saved"]
    run = supervise("--nproc-per-node 2", argv=argv)
    run.until(" 10/")
    run.process.kill()
    run.process.wait()
    assert not left(run.process.pid)
    assert list((tmp_path / "saved").glob("step_*/manifest.json"))  # saved, as after a SIGTERM
