"""What /proc and the control groups tell: of this process, of others, and of made-up ones."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import arena
from arena import _cgroup, _proc
from arena._proc import ProcError

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

MIB = 1 << 20
NOBODY = 2**22 + 1  # above the largest PID of Linux


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has 64 MiB and sleeps."""
    code = "import sys, time; x = b'1' * (64 << 20); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def zombie() -> Iterator[int]:
    pid = os.fork()
    if not pid:
        os._exit(0)
    while _proc.status(pid).state != "Z":
        time.sleep(0.001)
    yield pid
    os.waitpid(pid, 0)


def test_what_this_process_takes_is_seen_by_each_source() -> None:
    before, private = _proc.statm(), _proc.rollup().private
    taken = bytearray(b"1") * (64 * MIB)
    now = _proc.statm()
    assert now.resident - before.resident > 60 * MIB
    status = _proc.status()
    assert status.anonymous > 60 * MIB
    assert abs(status.resident - status.anonymous - status.file - status.shmem) < MIB
    assert status.peak >= status.resident > 60 * MIB
    assert status.state == "R"
    assert status.threads >= 1
    rollup = _proc.rollup()
    assert rollup.private - private > 60 * MIB
    assert rollup.private <= rollup.proportional
    assert len(taken) == 64 * MIB


def test_a_child_is_read_from_outside(child: subprocess.Popen[bytes]) -> None:
    pid = child.pid
    assert _proc.statm(pid).resident > 64 * MIB
    assert _proc.status(pid).anonymous > 64 * MIB
    assert _proc.status(pid).state in ("R", "S")
    assert _proc.rollup(pid).private > 64 * MIB
    minor, major = _proc.faults(pid)
    assert minor > 100
    assert major >= 0
    assert _proc.started(pid) > _proc.started()
    assert _proc.ticks(pid) is None
    with pytest.raises(ProcError, match=f"process {pid} does not show its ticks: set ARENA_EXPORT"):
        _proc.TickCounter(pid)


def test_page_faults_are_counted() -> None:
    before, _ = _proc.faults()
    with mmap.mmap(-1, 8 * MIB) as taken:  # not of a heap, which may have pages to spare
        taken.write(b"1" * (8 * MIB))
    assert _proc.faults()[0] - before >= 8 * MIB // 4096 // 2 or _huge()


def _huge() -> bool:
    return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()


def test_a_name_with_brackets_does_not_shift_the_fields() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert _proc.status(process.pid).name == "a) R 1 (b"
        assert _proc.started(process.pid) >= _proc.started()
        assert _proc.faults(process.pid)[0] > 100
        process.kill()


@pytest.mark.parametrize(
    "read",
    [
        _proc.statm,
        _proc.status,
        _proc.faults,
        _proc.rollup,
        _proc.started,
        _proc.ticks,
        _proc.TickCounter,
        _cgroup.cgroup,
    ],
)
def test_a_pid_that_is_none_is_said_in_one_line(read: object) -> None:
    assert callable(read)
    with pytest.raises(ProcError) as caught:
        read(NOBODY)
    assert str(caught.value) == f"there is no process {NOBODY}"
    with pytest.raises(ProcError, match=r"^there is no process 0$"):
        read(0)


def test_a_zombie_has_a_state_and_no_memory(zombie: int) -> None:
    status = _proc.status(zombie)
    assert (status.state, status.resident, status.peak, status.anonymous) == ("Z", 0, 0, 0)
    assert _proc.started(zombie) > 0
    for read in (_proc.statm, _proc.rollup):
        with pytest.raises(ProcError, match=f"^process {zombie} has ended: its memory is gone$"):
            read(zombie)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_process_of_another_user_is_said_to_be_one() -> None:
    me, (there, back) = os.getpid(), os.pipe()
    pid = os.fork()
    if not pid:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            _proc.rollup(me)
        except ProcError as error:
            os.write(back, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(back)
    with os.fdopen(there) as file:
        assert file.read() == (
            f"no permission to read /proc/{me}/smaps_rollup: the process is another user's, or "
            "protected"
        )


def test_finished_ticks_of_a_child_are_read_and_those_it_only_watches_are_not() -> None:
    code = (
        "import os, sys, arena\n"
        "arena.export_ticks()\n"
        "for line in sys.stdin:\n"
        "    for _ in range(int(line)):\n"
        "        with arena.tick(): pass\n"
        "    print(flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(arena.__file__).parent.parent,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(1000, file=process.stdin, flush=True)
        process.stdout.readline()
        with _proc.TickCounter(process.pid) as counter:
            first = counter.read()
            assert 990 <= first <= 1000
            assert _proc.ticks(process.pid) == first
            # This process has the counter open too, but it is not its own.
            mine = _proc.ticks()
            assert mine is None or mine != first
            print(500, file=process.stdin, flush=True)
            process.stdout.readline()
            assert 1490 <= counter.read() <= 1500
            process.kill()
            process.wait()
            assert 1490 <= counter.read() <= 1500
        with pytest.raises(ProcError, match="there is no process"):
            _proc.ticks(process.pid)


# ---- a /proc that is made up ---------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "7").mkdir()
    monkeypatch.setattr(_proc, "PROC", str(folder))
    return folder


def test_without_proc_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_proc, "PROC", str(tmp_path / "none"))
    with pytest.raises(
        ProcError, match=r"^there is no /proc here: memory is read from it, on Linux"
    ):
        _proc.statm()


def test_a_kernel_without_a_file_is_said_to_be_one(proc: Path) -> None:
    with pytest.raises(ProcError, match=r"^this system has no .*/proc/7/smaps_rollup$"):
        _proc.rollup(7)


def test_a_process_that_ends_in_the_middle_is_said_to_have_ended(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args: object) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr("builtins.open", gone)
    with pytest.raises(ProcError, match=r"^process 7 has ended: its memory is gone$"):
        _proc.status(7)


def test_sizes_of_statm_are_pages_and_those_of_status_kilobytes(proc: Path) -> None:
    (proc / "7/statm").write_text("1000 20 5 1 0 30 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert _proc.statm(7) == _proc.Statm(20 * page, 5 * page)
    (proc / "7/status").write_text(
        "Name:\tx y\nState:\tD (disk sleep)\nVmHWM:\t  300 kB\nVmRSS:\t 200 kB\nRssAnon:\t 100 kB\n"
        "RssFile:\t 60 kB\nRssShmem:\t 40 kB\nVmSwap:\t 8 kB\nThreads:\t3\n"
    )
    kb = 1024
    assert _proc.status(7) == _proc.Status(
        "x y", "D", 3, 200 * kb, 300 * kb, 100 * kb, 60 * kb, 40 * kb, 8 * kb
    )
    (proc / "7/smaps_rollup").write_text(
        "0-1 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: 8 kB\n"
        "Private_Clean: 2 kB\nPrivate_Dirty: 4 kB\n"
    )
    assert _proc.rollup(7) == _proc.Rollup(proportional=8 * kb, private=6 * kb)


# ---- control groups ------------------------------------------------------------------------------


def group(folder: Path, **values: object) -> None:
    """A group of made-up files: memory_max=5 is the file memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def mounted(proc: Path, kind: str, point: Path, options: str, root: str = "/") -> None:
    spaced = str(point).replace(" ", r"\040")
    (proc / "self/mountinfo").write_text(
        "22 1 0:1 / / rw shared:1 - ext4 /dev/vda rw\n"
        f"31 22 0:28 {root} {spaced} rw,nosuid shared:4 - {kind} {kind} rw,{options}\n"
    )


def version_2(proc: Path, point: Path, path: str, root: str = "/") -> None:
    mounted(proc, "cgroup2", point, "nsdelegate", root)
    (proc / "7/cgroup").write_text(f"0::{path}\n")


def version_1(proc: Path, point: Path, path: str, root: str = "/") -> None:
    mounted(proc, "cgroup", point, "memory", root)
    (proc / "7/cgroup").write_text(f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/\n")


def test_of_nested_groups_of_version_2_the_tightest_limit_counts(
    proc: Path, tmp_path: Path
) -> None:
    point = tmp_path / "with space"
    version_2(proc, point, "/pods/web/worker")
    group(point)
    group(point / "pods", memory_current=900, memory_max=1000, memory_high="max")
    group(point / "pods/web", memory_current=300, memory_max=500, memory_high=450)
    group(
        point / "pods/web/worker",
        memory_current=200,
        memory_max="max",
        memory_high=480,
        memory_events="low 0\nhigh 7\nmax 2\noom 1\noom_kill 3",
        memory_swap_current=20,
        memory_swap_max=64,
    )
    (point / "pods/web/worker/memory.swap_current").rename(
        point / "pods/web/worker/memory.swap.current"
    )
    (point / "pods/web/worker/memory.swap_max").rename(point / "pods/web/worker/memory.swap.max")
    found = _cgroup.cgroup(7)
    assert found == _cgroup.Cgroup(
        version=2,
        path=str(point / "pods/web/worker"),
        current=200,
        limit=500,
        room=100,  # in the outermost one, whose limit is not the lowest
        high=450,
        swap_current=20,
        swap_limit=64,
        oom_kills=3,
        events={"low": 0, "high": 7, "max": 2, "oom": 1, "oom_kill": 3},
    )


def test_a_group_that_does_not_count_memory_is_charged_to_the_one_around_it(
    proc: Path, tmp_path: Path
) -> None:
    version_2(proc, tmp_path / "c", "/a/b")
    group(tmp_path / "c/a", memory_current=10, memory_max=40)
    group(tmp_path / "c/a/b")
    found = _cgroup.cgroup(7)
    assert found is not None
    assert (found.path, found.current, found.limit) == (str(tmp_path / "c/a"), 10, 40)


def test_a_container_with_a_namespace_has_its_group_at_the_root(proc: Path, tmp_path: Path) -> None:
    version_2(proc, tmp_path / "c", "/")
    group(tmp_path / "c", memory_current=10, memory_max=40)
    found = _cgroup.cgroup(7)
    assert found is not None
    assert (found.current, found.limit, found.room) == (10, 40, 30)


def test_a_container_without_a_namespace_sees_its_group_at_the_mount_point(
    proc: Path, tmp_path: Path
) -> None:
    group(tmp_path / "c", memory_usage_in_bytes=10, memory_limit_in_bytes=40)
    group(tmp_path / "docker/12ab", memory_usage_in_bytes=11)  # beside the mount: not in it
    for path, root in (("/docker/12ab", "/docker/12ab"), ("/docker/12ab", "/elsewhere")):
        version_1(proc, tmp_path / "c", path, root)
        found = _cgroup.cgroup(7)
        assert found is not None
        assert (found.version, found.current, found.limit) == (1, 10, 40)


def test_of_nested_groups_of_version_1_the_tightest_limit_counts(
    proc: Path, tmp_path: Path
) -> None:
    none = 9223372036854771712
    version_1(proc, tmp_path / "c", "/a/b")
    group(tmp_path / "c", memory_usage_in_bytes=900, memory_limit_in_bytes=none)
    group(tmp_path / "c/a", memory_usage_in_bytes=100, memory_limit_in_bytes=400)
    group(
        tmp_path / "c/a/b",
        memory_usage_in_bytes=50,
        memory_limit_in_bytes=500,
        memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2",
        memory_failcnt=6,
        memory_stat=f"cache 3\nhierarchical_memory_limit {none}",
    )
    (tmp_path / "c/a/b/memory.memsw.usage_in_bytes").write_text("57\n")
    (tmp_path / "c/a/b/memory.memsw.limit_in_bytes").write_text("600\n")
    found = _cgroup.cgroup(7)
    assert found == _cgroup.Cgroup(
        version=1,
        path=str(tmp_path / "c/a/b"),
        current=50,
        limit=400,
        room=300,
        high=None,
        swap_current=7,
        swap_limit=100,
        oom_kills=2,
        events={"under_oom": 0, "oom_kill": 2, "failcnt": 6},
    )
    group(
        tmp_path / "c/a/b", memory_stat="hierarchical_memory_limit 200"
    )  # of one that is not seen
    found = _cgroup.cgroup(7)
    assert found is not None
    assert (found.limit, found.room) == (200, 150)


def test_no_limit_is_none(proc: Path, tmp_path: Path) -> None:
    version_2(proc, tmp_path / "c", "/a")
    group(tmp_path / "c/a", memory_current=10, memory_max="max", memory_high="max")
    found = _cgroup.cgroup(7)
    assert found is not None
    assert (found.limit, found.room, found.high, found.swap_current) == (None, None, None, None)
    assert found.oom_kills == 0
    none = 9223372036854771712
    version_1(proc, tmp_path / "c", "/b")
    group(
        tmp_path / "c/b",
        memory_usage_in_bytes=10,
        memory_limit_in_bytes=none,
        memory_stat=f"hierarchical_memory_limit {none}",
    )
    found = _cgroup.cgroup(7)
    assert found is not None
    assert (found.version, found.limit, found.room, found.swap_limit) == (1, None, None, None)


@pytest.mark.parametrize(
    ("text", "current"),
    [("0::/\n", 10), ("", None), ("0::/../other\n", None), ("5:cpu:/a\n", None)],
)
def test_a_group_that_cannot_be_seen_is_not_taken_for_the_one_that_is_mounted(
    text: str, current: int | None, proc: Path, tmp_path: Path
) -> None:
    version_2(proc, tmp_path / "c", "/")
    group(tmp_path / "c", memory_current=10)
    (proc / "7/cgroup").write_text(text)
    found = _cgroup.cgroup(7)
    assert (found and found.current) == current


def test_a_group_that_does_not_count_memory_is_none(proc: Path, tmp_path: Path) -> None:
    version_2(proc, tmp_path / "c", "/")
    group(tmp_path / "c")
    assert _cgroup.cgroup(7) is None


def test_a_group_that_is_not_mounted_is_none(proc: Path, tmp_path: Path) -> None:
    version_2(proc, tmp_path / "c", "/a")
    (proc / "self/mountinfo").write_text("22 1 0:1 / / rw shared:1 - ext4 /dev/vda rw\n")
    assert _cgroup.cgroup(7) is None


def test_the_group_of_this_process_is_the_kernels_own_answer() -> None:
    found = _cgroup.cgroup()
    if found is None:
        pytest.skip("no group counts the memory of this process")
    name = "memory.current" if found.version == 2 else "memory.usage_in_bytes"
    assert Path(found.path, name).exists()
    assert found.current > 0
    members = Path(found.path, "cgroup.procs").read_text().split()
    assert str(os.getpid()) in members or "0" in members


def test_a_process_that_is_killed_stays_readable_until_it_is_waited_for(
    child: subprocess.Popen[bytes],
) -> None:
    identity = _proc.started(child.pid)
    child.send_signal(signal.SIGKILL)
    while _proc.status(child.pid).state != "Z":
        time.sleep(0.001)
    assert _proc.started(child.pid) == identity
    child.wait()
    with pytest.raises(ProcError, match="there is no process"):
        _proc.started(child.pid)


def test_heaps_are_told_from_other_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text(
        "55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]\n"
        "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n"  # a further heap: 1 MiB of it
        "7f0000100000-7f0004000000 ---p 00000000 00:00 0 \n"
        "7f1000000000-7f1040000000 rw-p 00000000 00:00 0 \n"  # an array of 1 GiB
        "7f2000001000-7f2000101000 rw-p 00000000 00:00 0 \n"
        "7f3000000000-7f3000100000 rw-p 00000000 08:01 42                     /usr/lib/libc.so.6\n"
    )
    monkeypatch.setattr(_proc, "PROC", str(tmp_path))
    assert _proc.heaps() == 0x21000 + (1 << 20)
