"""A real SLURM cluster of two virtual nodes on this host, for as long as a test needs it.

munged, slurmctld and a slurmd for each node run from a folder of their own, as root, in a mount namespace in which
/etc/hosts knows the nodes; nothing else of the machine is touched. Partition `low` may be preempted by `high`.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
PATIENCE_S = 120  # without any progress: how long all of it takes depends on who else needs the machine
PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
ReturnToService=2
KillWait=20
OverTimeLimit=0
MinJobAge=300
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n[0-1] Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n[0-1] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What stands against a cluster here; empty: nothing."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install slurm-wlm munge"
    words = ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
    own_mounts = subprocess.run(words, capture_output=True, check=False)
    return "" if own_mounts.returncode == 0 else "SLURM's daemons need root, and mount namespaces"


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and its commands."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str) -> dict[str, str]:
        """The job, once it is in one of these states."""
        self.follow(lambda: self.job(number)["JobState"] in states, lambda: str(self.job(number)))
        return self.job(number)

    def follow(self, condition: Callable[[], bool], told: Callable[[], str] = lambda: "") -> None:
        """Wait until it holds, as long as any job changes its state, writes to its logs or trains."""
        seen, at = "", time.monotonic()
        while not condition():
            sizes = [
                path.stat().st_size for kind in ("*.out", "logs/[!.]*", "*/*.jsonl") for path in self.folder.glob(kind)
            ]
            if (now := f"{self('squeue', '-haro', '%i %T %r')}{sum(sizes)}") != seen:
                seen, at = now, time.monotonic()
            assert time.monotonic() < at + PATIENCE_S, f"no progress in {PATIENCE_S} s: {seen} {told()}"
            time.sleep(0.1)

    @staticmethod
    def until(condition: Callable[[], bool], within_s: float, told: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s: {told()}"
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two idle nodes, n0 and n1; their jobs end with the block."""
    folder.mkdir()
    folder.chmod(0o755)
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=socket.gethostname().split(".")[0], ports=ports))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n0 n1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir()
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] = f"/usr/sbin:/usr/bin:/sbin:/bin:{environment['PATH']}"
    munge = ["--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key", "--num-threads=1"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    nodes = [["slurmd", "-D", "-N", name] for name in ("n0", "n1")]
    daemons = [["munged", "--foreground", *munge], ["slurmctld", "-D"], *nodes]
    enter = f"mount --bind {folder}/hosts /etc/hosts && exec "
    running = []
    for daemon in daemons:
        words = ["unshare", "--mount", "sh", "-c", f'{enter}"$@"', "sh", *daemon]
        with (folder / f"{daemon[0]}-{len(running)}.out").open("wb") as log:
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        if daemon[0] == "munged":
            Cluster.until((folder / "munge.socket").exists, 10)
    found = Cluster(folder, environment)
    try:

        def idle() -> bool:
            done = subprocess.run(["sinfo", "-hN", "-o", "%T"], env=environment, capture_output=True, text=True)
            return done.stdout.split().count("idle") == 4  # two nodes, in two partitions each

        Cluster.until(idle, 30, lambda: (folder / "slurmctld.log").read_text()[-2000:])
        yield found
        with suppress(AssertionError):
            found("scancel", "--full", "--signal=KILL", "--user=root")
            found("scancel", "--user=root")
            found.follow(lambda: not found("squeue", "-h"))
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
