"""What the programs in this folder share: errors in one line, signals, locks, files that appear whole or not at all."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import signal
import socket
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)   # a program ends by these, after its cleanup

DISK_REMEDY = "choose a place that can be written"
REMEDIES = {errno.ENOSPC: "free some space, or choose another disk",
            errno.EDQUOT: "your quota is used up: free some space, or choose another disk",
            errno.EFBIG: "files may not be that large: raise ulimit -f, choose another file system or, for shards, a "
                         "smaller --shard-size"}


class DataError(Exception):
    """A problem with the input or the arguments, in one line with cause and remedy."""


def reason(problem):
    """A DataError or OSError in one line: file and cause."""
    if not isinstance(problem, OSError) or not problem.strerror:
        return str(problem)
    return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror


@contextlib.contextmanager
def writing(path, state=lambda: ""):
    """Makes a DataError of what the disk says, such as that it is full; state(): how far it has come."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}{state()}; {REMEDIES.get(error.errno, DISK_REMEDY)}"
                        ) from None


@contextlib.contextmanager
def replacing(path, mode="w"):
    """A file to write, which takes the place of `path` when the block ends; if it fails, `path` is unchanged."""
    remove_abandoned(path)
    temporary = f"{path}.{socket.gethostname()}.{secrets.token_hex(8)}.tmp"
    try:
        with open_locked(temporary, mode, fcntl.LOCK_EX)[0] as file:   # waits for a process in remove_abandoned()
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)   # while it is locked: to others it would seem abandoned
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(problem, OSError) and (problem.filename == temporary or problem.errno in REMEDIES):
            with writing(path):
                raise
        raise


def remove_abandoned(path):
    """Removes what replacing(path) has left in killed processes of this host: files that no process has locked. Those of
    other hosts stay, whose locks may not be seen here, and so do all on a file system without locks."""
    for temporary in glob.glob(f"{glob.escape(path)}.{glob.escape(socket.gethostname())}.*.tmp"):
        with contextlib.suppress(OSError), open(temporary, "r+b") as file:   # it is locked, or another user's
            if not lock(file):
                os.remove(temporary)


def sync_folder(path):
    """Syncs a folder, so that new names in it are on disk."""
    folder = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- Locks --------------------------------------------------------------------------------------

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)   # a file system without locks says one of them


def lock(file, how=fcntl.LOCK_EX | fcntl.LOCK_NB):
    """Locks an open file; BlockingIOError: another process holds it. Returns why it cannot be locked on a file system
    without locks; "": it is locked."""
    try:
        fcntl.lockf(file, how)   # not flock, which forked workers would hold, too
    except OSError as error:
        if error.errno in NO_LOCKS:
            return error.strerror
        if error.errno == errno.EACCES:   # which some systems say instead of EAGAIN
            raise BlockingIOError(error.errno, error.strerror) from None
        raise
    return ""


def open_locked(path, mode, how=fcntl.LOCK_EX | fcntl.LOCK_NB):
    """The file `path`, open for writing, and what lock() returns."""
    while True:
        with contextlib.ExitStack() as closed:
            file = closed.enter_context(open(path, mode, encoding=None if "b" in mode else "utf-8"))
            fault = lock(file, how)
            if in_place(file, path):   # else the process that held the lock has just removed it
                closed.pop_all()
                return file, fault


def in_place(file, path):
    """Is the open file still the one with this name?"""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path):
    """Holds the lock of the file `path`, and removes it afterwards. DataError: another process holds it. On a file
    system without locks, a warning."""
    try:
        file, fault = open_locked(path, "a")
    except BlockingIOError:
        raise DataError(f"{path}: another process is writing there: wait for it, or give another --out") from None
    except OSError:
        with writing(path):
            raise
    if fault:
        print(f"WARNING: {path} cannot be locked, on a file system without locks ({fault}): nothing keeps a second run "
              "from writing there, too", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        file.close()


# ---- Signals ------------------------------------------------------------------------------------


def on_signals(action, numbers=SIGNALS):
    """Sets what signals do; a SIGHUP that is ignored, as nohup has it, stays so."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, action)


def end_by_signal(number, _frame):
    on_signals(signal.SIG_IGN)   # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


@contextlib.contextmanager
def held_signals():
    """SIGNALS that arrive within the block act at its end. Not by a mask: a library's threads would take them."""
    arrived, before = [], [(number, signal.getsignal(number)) for number in SIGNALS]
    on_signals(lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, action in before:
            signal.signal(number, action)
        if arrived:
            signal.raise_signal(arrived[0])


def run_program(name, main, action=end_by_signal):
    """main(arguments); an error is one line on stderr. action: what SIGNALS do at first."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # ignored, as a parent may leave it, the status of children is lost
    on_signals(action)
    try:
        main(sys.argv[1:])
    except (DataError, OSError) as problem:
        sys.exit(f"{name}: error: {reason(problem)}")
