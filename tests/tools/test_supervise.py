# SPDX-License-Identifier: Apache-2.0
"""tools/supervise.py: what it restarts, where that begins, and that nothing is left behind.

Most tests give it a program of a few lines instead of the trainer. It does what its argument says.
"""

import errno
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import SCRIPT
from tests.supervisor import PROGRAM, ROOT, Supervisor, left, tensors
from tools.supervisor import node
from tools.supervisor.channel import Channel, Listener, WireError, call
from tools.supervisor.copies import Copies, Member
from tools.supervisor.flags import Mistake, parse
from tools.supervisor.report import (
    End,
    Fault,
    Report,
    alike,
    diagnosis,
    first_cause,
    verdict,
)
from training.faults.wire import BLOB_LIMIT, nonce


def ends(*codes: int | None) -> list[End]:
    return [End(rank, code) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    "codes, code",
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([2, 2], 2),
        ([1, 1], None),
        ([-9, 1], None),
        ([2, -9], None),  # the mistake may be that a rank was gone
        ([None, 1], None),  # with its node
        ([143, 143], None),
        ([0, 1], None),
    ],
)
def test_what_exit_codes_mean(codes: list[int | None], code: int | None) -> None:
    assert verdict(ends(*codes)) == code


def test_what_the_supervisor_killed_is_no_fault_of_its_own() -> None:
    killed = End(1, -9, killed=True)
    assert verdict([End(0, 2), killed]) == 2
    assert verdict([End(0, 0), killed]) is None  # it hung when the others were done
    assert first_cause([End(0, 0), killed])[0] == 1


def test_the_first_cause_is_the_rank_that_died_then_what_ranks_say() -> None:
    told = (
        "rank 1 failed first: the process died (killed?); its last report, 0.1 s before: backward"
    )
    assert first_cause([End(0, 1, told), End(1, -9)]) == (
        1, "ended by SIGKILL; its last report, 0.1 s before: backward",
    )  # fmt: skip
    hung = "rank 2 failed first while waiting for data: no heartbeat"
    assert first_cause([End(0, 1, hung), End(2, -9, killed=True)])[0] == 2
    assert first_cause([End(0, 1, "RuntimeError: broken")]) == (0, "RuntimeError: broken")
    assert first_cause([End(3, None, "its node was lost")]) == (3, "its node was lost")


def test_ranks_that_end_alike_are_no_host_s_fault() -> None:
    assert alike(ends(1, 1)) == 2 and alike(ends(-9, 1)) == 0 and alike(ends(75, 1)) == 0
    told = "rank 1 failed first: RuntimeError: broken"
    assert alike([End(0, 1, told), End(1, 1, "RuntimeError: broken")]) == 0
    assert alike([End(0, 1, "KeyError: 'x'"), End(1, 1, "KeyError: 'x'")]) == 2
    assert alike([End(0, 1), End(1, 1, killed=True)]) == 0
    crash = [Fault(i, 0, 0, "KeyError: 'x'", 3, alike=2) for i in range(3)]
    said = diagnosis(crash)
    assert "always all 2 ranks alike" in said and "always rank" not in said
    assert "one rank" in diagnosis([f._replace(alike=1) for f in crash])


def test_a_diagnosis_tells_a_bad_host_from_a_bad_step() -> None:
    same = [Fault(i, 3, 1, "ended by SIGSEGV", 7) for i in range(3)]
    assert "attempt 2: rank 3 on node 1, after step 7: ended by SIGSEGV" in diagnosis(same)
    assert "always rank 3" in diagnosis(same)
    several = [Fault(i, i, 0, "not finite", 7) for i in range(3)]
    assert "several ranks, at one step" in diagnosis(several)


def test_goodput_counts_steps_that_stay(capfd: Any) -> None:
    """Ten steps in 1 s; five of them lost; ten more in 1 s: 15 tenths of a second of 4 s."""
    from tools.supervisor.report import Attempt

    report = Report(None, began=time.monotonic() - 4.0)
    at = report.began
    report.attempts.append(Attempt())
    report.progress([0, at + 0.5, 10, at + 1.5, 0], 0)
    report.failed(0, 1, 0, "killed", at + 1.6)
    report.attempts.append(Attempt())
    report.progress([5, at + 2.0, 5, at + 2.0, 2], 1)
    assert report.steps_lost == 5 and not report.repairs
    report.progress([5, at + 2.0, 15, at + 3.0, 2], 1)
    assert report.repairs == [pytest.approx(1.4)]
    assert report.goodput() == pytest.approx(1.5 / 4, abs=0.02)
    assert "from step 5 (memory), so 5 steps were lost" in capfd.readouterr().err


@pytest.mark.parametrize(
    "plan, code, attempts",
    [
        ({"": 0}, 0, 1),
        ({"": 75}, 75, 1),
        pytest.param({"": 2}, 2, 1, marks=pytest.mark.prove),
        pytest.param({"0.1": 1, "step": 1}, 0, 2, marks=pytest.mark.prove),
        ({"0.0": -9, "1.1": -11, "step": 1}, 0, 3),
        ({".1": 1}, 1, 3),  # a crash loop
    ],
)
def test_what_is_restarted(
    supervise: Callable[..., Supervisor], plan: dict[str, Any], code: int, attempts: int
) -> None:
    run = supervise("--nproc-per-node 2", plan)
    assert run.wait() == code
    starts = run.starts()
    assert [words[:3] for words in starts] == [
        [str(a), str(r), "2"] for a in range(attempts) for r in range(2)
    ]
    assert len({words[3] for words in starts}) == attempts  # a port for each attempt
    assert run.rows("end")[0]["code"] == code and len(run.rows("fault")) == attempts - (code != 1)


def test_a_crash_loop_ends_with_a_diagnosis(supervise: Callable[..., Supervisor]) -> None:
    run = supervise("--nproc-per-node 2 --crash-loop 2", {".1": "OSError: bad sector", "step": 7})
    assert run.wait() == 1
    said = run.said()
    assert "2 faults in a row without a new step" in said and "always rank 1" in said
    assert said.count("rank 1 on node 0, after step 7: OSError: bad sector") == 2


def test_all_ranks_that_crash_alike_are_blamed_together(
    supervise: Callable[..., Supervisor],
) -> None:
    run = supervise("--nproc-per-node 2 --crash-loop 2", {"": "KeyError: 'lr'"})
    assert run.wait() == 1
    assert "always all 2 ranks alike" in run.said() and "always rank" not in run.said()
    assert [row["alike"] for row in run.rows("fault")] == [2, 2]


def test_the_exit_code_that_is_printed_is_that_of_the_process(
    supervise: Callable[..., Supervisor],
) -> None:
    """Also where signals come until the very end, as from several of SLURM's processes."""
    run = supervise("--nproc-per-node 2", {"": "wait"})
    for rank in (0, 1):
        run.until(f"0 {rank} 2 ")
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    (printed,) = re.findall(r"exit code (\d+) after", run.said())
    assert run.wait() == int(printed) and int(printed) in (75, 128 + signal.SIGTERM)


@pytest.mark.prove  # 20 s
def test_a_starter_that_is_stopped_is_woken_or_replaced(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = supervise("--nproc-per-node 2", {"0.0": "wait", "0.1": "wait", "step": 1})
    for rank in (0, 1):
        run.until(f"0 {rank} 2 ")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    starter = int(children.split()[0])
    os.kill(starter, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while state(starter) == "T" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert state(starter) != "T"  # it goes on; stopped again and again, it is killed
    while state(starter) and time.monotonic() < deadline + 60:
        os.kill(starter, signal.SIGSTOP)
        time.sleep(0.2)
    assert run.wait() == 0 and len(run.starts()) == 4
    assert "has sent no heartbeat" in run.said()


def state(process: int) -> str:
    """Return the letter of a process's state, T where it is stopped; "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_full_memory_of_the_host_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    (full := tmp_path / "shm").mkdir()
    monkeypatch.setattr(node, "MEMORY", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reserve = os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        if str(full) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    path, held = node.memory_directory()
    os.close(held)
    assert path.parent == tmp_path and not list(full.iterdir())
    assert (path / "progress").stat().st_size == node.PROGRESS.size
    assert "No space left on device" in capfd.readouterr().err


def test_signals_are_passed_on_and_end_the_run(supervise: Callable[..., Supervisor]) -> None:
    run = supervise("--nproc-per-node 2", {"": "wait"})
    for rank in (0, 1):
        run.until(f"0 {rank} 2 ")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75 and len(run.starts()) == 2


def test_nobody_outlives_a_supervisor_that_was_killed(
    supervise: Callable[..., Supervisor],
) -> None:
    run = supervise("--nproc-per-node 2", {"": "wait"})
    run.until("0 0 2 ")
    run.until("0 1 2 ")
    assert left(run.process.pid, 0.0)
    run.process.kill()
    run.process.wait()
    assert not left(run.process.pid)


def test_ranks_die_with_what_started_them_and_start_again(
    supervise: Callable[..., Supervisor],
) -> None:
    run = supervise("--nproc-per-node 2", {"0.0": "wait", "0.1": "wait", "step": 1})
    run.until("0 0 2 ")
    run.until("0 1 2 ")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    assert run.wait() == 0 and len(run.starts()) == 4
    assert "the process that started it was killed" in run.said()


def test_a_slot_that_fails_again_gives_way_to_a_spare(
    supervise: Callable[..., Supervisor],
) -> None:
    run = supervise("--nproc-per-node 3 --spares 1", {"0.1": 1, "1.1": 1})
    assert run.wait() == 0
    assert [words[2] for words in run.starts()] == ["2"] * 6


def test_with_too_few_places_left_the_largest_world_that_fits_goes_on(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    plan = {"0.2": 1, "1.2": 1, "fits": [1]}
    argv = [str(tmp_path / "program.py"), json.dumps(plan), "--global-batch-size", "6"]
    run = supervise("--nproc-per-node 3 --elastic-dp --cold", argv=argv)
    assert run.wait() == 0
    assert [words[2] for words in run.starts()] == ["3"] * 6 + ["1"]


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--nnodes 2", "--nnodes 2 needs --master-addr"),
        ("--nnodes 2 --node-rank 2 --master-addr x", "--node-rank 2 is not one of --nnodes 2"),
        (
            "--nnodes 2 --master-addr 127.0.0.1",
            "prove that they belong to one run",
        ),
        ("--nproc-per-node 2 --spares 2", "--spares 2 leaves no place"),
        ("--elastic-dp", "--elastic-dp keeps the global batch"),
        ("--max-restarts=1 nothing.py", "nothing.py: there is no such program"),
        ("--master-port 99999", "--master-port 99999: a port is 1 to 65535"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, flags: str, says: str) -> None:
    for name in ("WEFT_SECRET", "WEFT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    with pytest.raises(Mistake, match=says):
        parse([*flags.split(), "pretrain_llama.py", "--lr", "1"], None)


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("SLURM_STEP_NUM_NODES", "x", "SLURM_STEP_NUM_NODES in the environment is 'x'"),
        ("SLURM_NODEID", "-1", "SLURM_NODEID in the environment is '-1'"),
        ("MASTER_PORT", "http", "MASTER_PORT in the environment is 'http'"),
        ("MASTER_PORT", "0", "MASTER_PORT 0: a port is 1 to 65535"),
    ],
)
def test_mistakes_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1"}
    for each, text in (step | {name: value}).items():
        monkeypatch.setenv(each, text)
    monkeypatch.chdir(ROOT)
    with pytest.raises(Mistake, match=says):
        parse(["pretrain_llama.py", "--lr", "1"], None)


def test_supervisors_that_mpirun_starts_must_know_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would start a run of its own node alone."""
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(
            f"OMPI_COMM_WORLD_{name}", {"SIZE": "2", "LOCAL_SIZE": "1"}.get(name, "0")
        )
    monkeypatch.chdir(ROOT)
    with pytest.raises(Mistake, match="mpirun starts 2 of these, and --nnodes is 1: give"):
        parse(["pretrain_llama.py", "--lr", "1"], None)
    words = "--nnodes 2 --node-rank 1 --master-addr n1 pretrain_llama.py".split()
    monkeypatch.setenv("WEFT_SECRET", "x" * 32)
    assert parse(words, None)[0].nnodes == 2


def test_a_number_out_of_range_is_a_mistake_of_one_line(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--nproc-per-node", "0", "pretrain_llama.py"], None)
    assert "--nproc-per-node: 0 must be above 0" in capsys.readouterr().err


class Met:
    """A listener with a seat for node 1, and who came."""

    def __init__(self, secret: bytes = b"the secret of a run") -> None:
        self.met: list[tuple[Channel, int | None, Any]] = []
        self.wrong: list[str] = []
        self.over = threading.Event()

        def serve(channel: Channel, number: int | None, seat: Any) -> None:
            self.met.append((channel, number, seat))
            self.over.wait(20.0)

        self.listener = Listener("127.0.0.1", 0, secret, 5.0, serve, range(1, 2), self.wrong.append)

    def call(self, secret: bytes = b"the secret of a run", **more: Any) -> Channel:
        return call("127.0.0.1", self.listener.port, secret, 5.0, **more)

    def came(self) -> Channel:
        deadline = time.monotonic() + 10
        while not self.met and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.met[-1][0]


@pytest.fixture
def met() -> Iterator[Met]:
    made = Met()
    yield made
    made.over.set()
    made.listener.close()


def test_a_stranger_is_not_heard_and_one_with_another_secret_is_told(met: Met) -> None:
    for _ in range(2):
        with pytest.raises(WireError, match="it has another secret") as error:
            met.call(b"another secret")
        assert error.value.final
    with socket.create_connection(("127.0.0.1", met.listener.port)) as mute:
        mute.sendall(b"[" * 30_000)
        mute.settimeout(10.0)
        with suppress(OSError):
            while mute.recv(4096):
                pass
    assert not met.met and met.wrong == ["127.0.0.1"]  # said once


def test_the_first_holder_of_a_seat_stays_while_it_is_heard(met: Met) -> None:
    def refusal(**more: Any) -> WireError:
        with pytest.raises(WireError) as error:
            met.call(kind="node", number=1, **more)
        return error.value

    first, same = nonce(), nonce()
    met.call(kind="node", number=1, session=first)
    met.came()
    why = refusal(session=same)
    assert "another process, at 127.0.0.1, is node 1 already" in str(why) and not why.final
    assert not refusal(session=same).final  # the holder may be dead
    met.met[0][2].last_report = time.monotonic()
    assert refusal(session=same).final
    met.call(kind="node", number=1, session=first)  # after its connection broke
    with pytest.raises(WireError, match="there is no node 2 here: nodes end at 1") as error:
        met.call(kind="node", number=2)
    assert error.value.final
    met.over.set()  # the holder is gone
    deadline = time.monotonic() + 10
    while met.listener.admission.seats and time.monotonic() < deadline:
        time.sleep(0.01)
    met.call(kind="node", number=1, session=same)


@pytest.mark.parametrize("change", ["flip", "repeat", "long"])
def test_a_changed_a_repeated_and_an_endless_frame_are_refused(met: Met, change: str) -> None:
    mine = met.call()
    theirs = met.came()
    connection = mine._connection
    connection._flush = lambda: None  # keep what is sent
    connection.send({"hello": 1}, b"bytes")
    frame = connection._out
    if change == "flip":
        frame[-1] ^= 1
    if change == "long":
        frame[:4] = b"\xff" * 4
    connection.sock.sendall(frame)
    if change == "repeat":
        assert theirs.receive() == ({"hello": 1}, b"bytes")
        connection.sock.sendall(frame)
    with pytest.raises(WireError):
        theirs.receive()
    mine.close()


def test_bytes_beside_a_message_arrive_whole(met: Met) -> None:
    """Several times what the sockets take at once, both ways."""
    blob = os.urandom(BLOB_LIMIT)
    mine = met.call()
    theirs = met.came()
    sender = threading.Thread(target=lambda: [mine.send({"part": i}, blob) for i in range(3)])
    sender.start()
    for i in range(3):
        assert theirs.receive() == ({"part": i}, blob)
    sender.join()
    mine.close()
    with pytest.raises(WireError, match="closed the connection"):
        theirs.receive()


def members(count: int) -> tuple[dict[int, Member], list[tuple[int, dict[str, Any]]]]:
    orders: list[tuple[int, dict[str, Any]]] = []
    made = {
        n: Member(lambda message, n=n: orders.append((n, message)), f"host{n}", 1000 + n, 1)
        for n in range(count)
    }
    return made, orders


def kept(copies: Copies, step: int, nodes: list[int]) -> None:
    """Let these of three nodes report that their ranks' files of a step are there."""
    files = [*(f"{n}.safetensors" for n in range(3)), "manifest.json"]
    needs = {str(n): [f"{n}.safetensors"] for n in range(3)}
    for n in nodes:
        have = [f"{n}.safetensors", "manifest.json"]
        event = {"kept": step, "files": files, "needs": needs, "have": have}
        copies.copy_made(n, event, [0, 1, 2], 3)


def test_each_node_fetches_anothers_files_and_then_older_copies_go() -> None:
    three, orders = members(3)
    copies = Copies(three)
    kept(copies, 5, [0, 1, 2])
    assert {n: m["fetch"]["from"][0][0] for n, m in orders} == {1: "host0", 2: "host1", 0: "host2"}
    for n in three:
        assert not any("forget" in message for _, message in orders)
        have = [f"{n}.safetensors", f"{(n - 1) % 3}.safetensors", "manifest.json"]
        copies.fetched(n, {"fetched": 5, "have": have})
    assert [m for _, m in orders if "forget" in m][0]["forget"][0] == 5
    orders.clear()
    kept(copies, 10, [0, 1])  # node 2 died in it: step 10 is nowhere whole
    del three[2]
    assert copies.choose({0: [0], 1: [1, 2]}, 3) == 5  # node 2's rank is on node 1 now
    fetch = {n: m["fetch"]["from"] for n, m in orders if "fetch" in m}
    assert fetch == {1: [["host0", 1000, ["2.safetensors"]]]} and copies.waiting == {1}
    orders.clear()
    assert copies.choose({0: [0]}, 1) == 5  # another world: it may need any file
    assert dict(orders)[0]["fetch"]["from"] == [["host1", 1001, ["1.safetensors"]]]
    del three[0]  # nobody has all files any more
    assert copies.choose({1: [0]}, 1) is None


def test_copies_of_steps_that_were_undone_are_not_restored() -> None:
    """With --on-nan rewind a run goes back, and what follows is not what was before."""
    one, orders = members(1)
    copies = Copies(one)
    have = {"files": ["manifest.json"], "needs": {"0": []}, "have": ["manifest.json"]}
    for step in (20, 5):
        copies.copy_made(0, {"kept": step, **have}, [0], 1)
        copies.fetched(0, {"fetched": step, "have": ["manifest.json"]})
    assert (0, {"forget": [0, 5]}) in orders
    assert copies.choose({0: [0]}, 1) == 5


MODEL = (
    "--mock-data --vocab-size 500 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --lr 1e-3 --log-interval 1 --num-workers 0 --device cpu --global-batch-size 4 "
    "--train-iters 20 --zero-stage 1"
)


def kill_at(call: int, rank: int = 1) -> str:
    return json.dumps({"point": "update", "rank": rank, "call": call, "how": "kill"})


def test_a_killed_rank_restarts_from_memory_and_ends_with_the_same_bits(
    supervise: Callable[..., Supervisor], launcher: Any, tmp_path: Path
) -> None:
    """The copy of step 10 may still be on its way as the rank dies: then that of step 5 counts."""
    short = MODEL.replace("--train-iters 20", "--train-iters 17").split()
    flags = [*short, "--save", f"{tmp_path}/saved", "--peer-checkpoint", "5"]
    argv = [str(SCRIPT), kill_at(13), *flags, "--log-json", str(tmp_path / "log.jsonl")]
    run = supervise("--nproc-per-node 2", argv=argv)
    oracle = launcher.run(2, [*short, "--save", "{dir}/saved"])
    assert run.wait() == 0, run.said()
    (back,) = run.rows("back")
    assert (back["source"], back["steps_lost"]) == ("memory", 12 - back["begun_at"])
    assert back["begun_at"] in (5, 10)
    assert back["mttr_seconds"] < 20.0 and run.rows("fault")[0]["step"] == 12
    assert tensors(tmp_path / "saved", 17) == tensors(oracle.folder / "saved", 17)
