"""Threads of the package: they block all signals, and one that cannot be started is an error of the package."""


def test_program_takes_a_signal_that_it_blocks(child, socket):
    taker = child(
        """
import asyncio, os, threading
with pw.connect(socket=sys.argv[1]) as d, d.semaphore("s", 1) as semaphore:
    async def wait():
        # A thread waits for the permit.
        waiting = asyncio.ensure_future(d.semaphore("s", 1).acquire_async(60))
        while semaphore.waiting == 0:
            await asyncio.sleep(0.001)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        blocked = []
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/status") as status:
                    bits = next(line for line in status if line.startswith("SigBlk:")).split()[1]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since it was listed
            blocked.append(bool(int(bits, 16) >> signal.SIGUSR1 - 1 & 1))
        say(len(blocked) >= 4, all(blocked))
        os.kill(os.getpid(), signal.SIGUSR1)
        say(signal.sigwait({signal.SIGUSR1}).name)
        waiting.cancel()
    asyncio.run(wait())
""",
        socket,
        PYTHONWARNINGS="ignore",
        OPENBLAS_NUM_THREADS="1",
    )
    taker.tell()
    assert taker.says() == "True True"
    assert taker.says() == "SIGUSR1"
    assert taker.end() == 0


def test_thread_that_cannot_be_started_is_an_error_of_the_package(child):
    limited = child(
        """
import asyncio, os, resource, shutil, tempfile
if os.geteuid() == 0:
    # No limit of processes applies to root.
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
os.umask(0o077)
directory = tempfile.mkdtemp(prefix="pw")
os.environ["XDG_STATE_HOME"] = directory
socket = directory + "/sockets/test.sock"
try:
    d = pw.connect(socket=socket)
except pw.Error as error:
    # Another user may not run the program here.
    say("skipped", error)
    sys.exit()
numbers = directory + "/numbers.npy"
np.save(numbers, np.arange(3))
full = d.semaphore("s", 1)
permit = full.acquire()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
calls = {
    "connect": lambda: pw.connect(socket=socket, start=False),
    "start": lambda: pw.connect(socket=directory + "/other/test.sock"),
    "put": lambda: d.put_file(numbers, "numbers", device="host"),
    "acquire": lambda: asyncio.run(full.acquire_async()),
    "doctor": pw.doctor,
}
for name, call in calls.items():
    try:
        call()
        say(name, "started")
    except pw.Error as error:
        say(name, "no further thread or process" in str(error))
    except BaseException as error:
        say(name, repr(error))
d.put("x", np.arange(3), device="host").close()
permit.release()
say("still there", len(d.ps()))
d._native.stop_broker(True)
shutil.rmtree(directory, ignore_errors=True)
os._exit(0)
""",
        PYTHONWARNINGS="ignore",
    )
    first = limited.says()
    if first.startswith("skipped"):
        return
    assert first == "connect True"
    for name in ("start", "put", "acquire", "doctor"):
        assert limited.says() == f"{name} True"
    assert limited.says() == "still there 1"
    assert limited.end() == 0

