"""Python code that tries to leave a sandbox, to exhaust the machine, or to confuse what runs it.

`@SECRET_FILE@`, `@FOLDER@`, `@PORT@`, `@PID@`, `@HOME@` stand for things of the machine that the test plants or knows.
An attack that succeeds prints `ESCAPED`, prints the secret, writes into the folder or reaches the server of the test.
"""

from __future__ import annotations

from dataclasses import dataclass

TIME = r"took longer than [13] s"
MEMORY = r"MemoryError|used more than 128 MB"
DENIED = NO_PROCESSES = "Operation not permitted"
OPENING = "Read-only file system|Operation not permitted"
# Every file that may be written, apart from the temporary directory and three devices without memory.
WRITABLE = """import os
named = {{'/tmp', '/dev/null', '/dev/random', '/dev/urandom'}}
found = [path for top in ({},) for folder, names, files in os.walk(top) for name in names + files
         for path in [os.path.join(folder, name)] if not os.path.islink(path) and os.access(path, os.W_OK)]
print('ESCAPED' if set(found) - named else 'held')"""
ABSENT = r"ModuleNotFoundError|AttributeError|NameError|NotImplementedError|ImportError|SyntaxError"  # not in Monty


@dataclass(frozen=True)
class Attack:
    """Code, and what the result must show in each sandbox: a regular expression for its error and output together."""

    name: str
    code: str
    bubblewrap: str
    monty: str = ABSENT
    bare: bool = False  # whether it is harmless to run without a sandbox, to show that there it succeeds


FILES = [
    Attack("passwords", "print(open('/etc/passwd').read()); print('ESCAPED')", "FileNotFound", "PermissionError", True),
    Attack("secret file", "print(open('@SECRET_FILE@').read())", "FileNotFound", "PermissionError", True),
    Attack("home", "import os\nprint(os.listdir('@HOME@'), 'ESCAPED')", "FileNotFound", "PermissionError", True),
    Attack("root folder", "import os\nprint(sorted(os.listdir('/')))", r"container_init.py.*tmp", "PermissionError"),
    Attack("write", "open('@FOLDER@/new', 'w').write('x')", "FileNotFound", "PermissionError", True),
    Attack("write to system", "open('/usr/lib/new', 'w').write('x'); print('ESCAPED')", "OSError", "PermissionError"),
    Attack("write to root", "open('/new', 'w').write('x'); print('ESCAPED')", "Read-only", "PermissionError"),
    Attack(
        "write to packages", "open('/python/lib/new', 'w').write('x'); print('ESCAPED')", "Read-only", "PermissionError"
    ),
    Attack(
        "symbolic link",
        "import os\nos.symlink('@SECRET_FILE@', '/tmp/link')\nprint(open('/tmp/link').read())",
        "FileNotFound",
    ),
    Attack("path upwards", "print(open('/tmp/' + '../' * 20 + '@SECRET_FILE@').read())", "FileNotFound", "Permission"),
    Attack("open directory", "import os\nprint(os.listdir('/proc/1/root'), 'ESCAPED')", "FileNotFound", "Permission"),
    Attack(
        "device", "import os\nos.mknod('/tmp/disk', 0o60600, os.makedev(8, 0)); print('ESCAPED')", "PermissionError"
    ),
]
NETWORK = [
    Attack(
        "loopback server",
        "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 1).sendall(b'ESCAPED')",
        DENIED,
        bare=True,
    ),
    Attack(
        "download", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:@PORT@')", "URLError", bare=True
    ),
    Attack(
        "host of a virtual machine", "import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint('ESCAPED')", DENIED
    ),
    Attack(
        "pairs of other families",
        "import ctypes\nlibc, pair = ctypes.CDLL(None, use_errno=True), (ctypes.c_int * 2)()\n"
        "print({(libc.socketpair(family, 5, 0, pair), ctypes.get_errno()) for family in range(2, 46)})",
        r"^None\n\{\(-1, 1\)\}\n$",  # otherwise the kernel loads the module of the family
    ),
    Attack("server of its own", "import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('ESCAPED')", DENIED),
    Attack(
        "connections that nobody accepts",
        "import socket\nserver = socket.socket(socket.AF_UNIX)\nserver.bind('\\0x')\nserver.listen(4096)\n"
        "for _ in range(300):\n    client = socket.socket(socket.AF_UNIX)\n    client.connect('\\0x')\n"
        "    client.settimeout(0.0)\n    client.send(bytes(1 << 17))\n    client.close()\nprint('ESCAPED')",
        DENIED,
    ),
    Attack(
        "open files in flight",
        "import socket\none, other = socket.socketpair()\nfor _ in range(100): socket.send_fds(one, [b'x'], [0] * 250)",
        DENIED,
    ),
    Attack(
        "size of a socket",
        "import socket as s\ns.socketpair()[0].setsockopt(s.SOL_SOCKET, s.SO_SNDBUF, 1 << 24)\nprint('ESCAPED')",
        DENIED,
    ),
    Attack("messages of the kernel", "import socket\nsocket.socket(16, socket.SOCK_RAW)\nprint('ESCAPED')", DENIED),
    Attack("names", "import socket\nprint(socket.gethostbyname('example.com'), 'ESCAPED')", "gaierror"),
]
MACHINE = [
    Attack("environment", "import os\nprint(dict(os.environ))", "HOME", "RuntimeError", True),
    Attack("host's /proc", "print(open('/proc/@PID@/environ').read(), 'ESCAPED')", "NotFound", "PermissionError", True),
    Attack("settings of the machine", WRITABLE.format("'/proc', '/sys', '/dev', '/hidden'"), "held", "held", True),
    Attack(
        "core pattern",
        "import os\nprint('ESCAPED' if os.access('/proc/sys/kernel/core_pattern', os.W_OK) else 'held')",
        "held",
        "NotImplemented|AttributeError|NameError",
    ),
    Attack(
        "paths of the machine", "print(open('/proc/self/mountinfo').read(), 'ESCAPED')", "FileNotFound", "Permission"
    ),
    Attack(
        "mounts of the machine",
        "import ctypes, struct\ncall = ctypes.CDLL(None).syscall\n"
        "root = struct.pack('IIQQQ', 32, 0, 0xffffffffffffffff, 0, 0)\n"
        "print('ESCAPED' if call(458, root, (ctypes.c_uint64 * 99)(), 99, 0) > 0 else 'held')",  # listmount
        "held",
    ),
    Attack(
        "hidden /proc",
        "import os\nos.chdir(os.open('/hidden', os.O_PATH))\nos.open('/hidden/proc', os.O_PATH)\nprint('ESCAPED')",
        "Permission denied: '/hidden/proc'|Permission denied",
    ),
    Attack("opening the hidden /proc", "import os\nos.chmod('/hidden', 0o777)\nprint('ESCAPED')", OPENING),
    Attack("user of the machine", "import os\nprint(os.getresuid(), os.getgroups())", r"\(65534, 65534, 65534\) \[\]"),
    Attack("back to root", "import os\nos.setresuid(0, 0, 0)\nprint('ESCAPED')", "PermissionError|OSError"),
    Attack(
        "capabilities",
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "print(libc.capget(header, data), *data)\nfor index in range(6): data[index] = 0xffffffff\n"
        "print(libc.capset(header, data))",
        r"^None\n0 0 0 0 0 0 0\n-1\n$",
    ),
    Attack(
        "first process",
        "import os\nfor name in ('environ', 'mem', 'fd/3', 'maps'):\n"
        "    try: print(open('/proc/1/' + name, 'rb').read(100), 'ESCAPED')\n    except OSError as error: print(error)",
        "No such file",
        "PermissionError|Permission denied",
    ),
    Attack(
        "memory of the first process",
        "import ctypes\ncall = ctypes.CDLL(None).syscall\nprint([call(438, call(434, 1, 0), 0, 0), call(434, 1, 0)])",
        r"\[-1, \d+\]",  # pidfd_getfd(pidfd_open(1), 0)
    ),
    Attack(
        "kernel's log", "import ctypes\nprint(ctypes.CDLL(None).klogctl(3, ctypes.create_string_buffer(99), 99))", "-1"
    ),
    Attack(
        "signal to the parent",
        "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 19)\nprint('on')",
        r"^None\non",
    ),
    Attack("signal to the host", "import os\nos.kill(@PID@, 9)", "ProcessLookup|PermissionError"),
    Attack("interrupt", "import os, time\nos.kill(1, 2)\ntime.sleep(0.5)\nprint(40 + 2)", r"^None\n42\n$"),
    Attack("signal to all", "import os\nos.kill(-1, 9)\nos.kill(1, 15)\nos.kill(1, 2)\nprint('on')", "on"),
    Attack("debugger", "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))", "-1"),
    Attack(
        "new user space",
        "import ctypes\nprint('ESCAPED' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'no')",
        "no",
    ),
    Attack(
        "mount", "import ctypes\nprint(ctypes.CDLL(None).mount(b'/', b'/tmp', None, 4096, None) or 'ESCAPED')", "-1"
    ),
    Attack("root", "import os\nos.setuid(0)\nprint('ESCAPED')", "OSError|PermissionError"),
    Attack("chroot", "import os\nos.chroot('/tmp')\nprint('ESCAPED')", "PermissionError"),
    Attack("commands", "import subprocess\nprint(subprocess.run(['/bin/sh', '-c', 'id']), 'ESCAPED')", NO_PROCESSES),
    Attack("memory of the loader", "import ctypes\nctypes.string_at(0)", "SIGSEGV"),
]
EXHAUSTION = [
    Attack("fork bomb", "import os\nwhile True: os.fork()", NO_PROCESSES),
    Attack(
        "fork bomb that stops its parent",
        "import os, signal\nwhile True:\n    os.fork()\n    os.kill(1, signal.SIGSTOP)",
        NO_PROCESSES,
    ),
    Attack(
        "threads",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        f"started more than 128 threads|can't start new thread|{MEMORY}",
    ),
    Attack(
        "small threads",
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "started more than 128 threads",
    ),
    Attack("fork in C", "import ctypes\nprint([ctypes.CDLL(None).fork(), ctypes.CDLL(None).vfork()])", r"\[-1, -1\]"),
    Attack("spawn", "import os\nos.posix_spawn('/python/bin/python', ['python', '-c', '1'], {})", NO_PROCESSES),
    Attack("list", "x = []\nwhile True: x.append('a' * 1000)", MEMORY, MEMORY),
    Attack("string", "x = 'a' * 10**11", MEMORY, MEMORY),
    Attack("growing string", "x = 'a'\nwhile True: x += x", MEMORY, MEMORY),
    Attack("power", "x = 10 ** 10 ** 10", f"{MEMORY}|{TIME}", f"{MEMORY}|{TIME}"),
    Attack("references", "a = [1] * 10\nfor i in range(20): a = [a] * 10\na", f"{MEMORY}|{TIME}", f"{MEMORY}|{TIME}"),
    Attack(
        "shared memory",
        "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 1 << 24))\n    x[-1].write(b'x' * (1 << 24))",
        DENIED,
    ),
    *(
        Attack(
            f"shared memory {how}",  # it is kept while one page of it is mapped
            "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
            "libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\nfor _ in range(20):\n"
            f"    address = libc.mmap(None, 20 << 20, 3, {flags}, {file}, 0)\n"
            "    assert address != 2**64 - 1, 'held'\n    ctypes.memset(address, 1, 20 << 20)\n"
            "    libc.munmap(address + 4096, (20 << 20) - 4096)\nprint('ESCAPED')",
            "AssertionError: held|No such file",
        )
        for how, flags, file in (
            ("without a name", "0x21", "-1"),
            ("of a device", "1", "os.open('/dev/zero', os.O_RDWR)"),
        )
    ),
    Attack(
        "tables of pages",  # of pages without content, which count nowhere
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nfor index in range(30_000):\n"
        "    address = libc.mmap(ctypes.c_void_p((1 << 44) + (index << 30)), 4096, 1, 0x100022, -1, 0)\n"
        "    ctypes.string_at(ctypes.c_void_p(address), 1)\nprint('ESCAPED')",
        MEMORY,
    ),
    Attack(
        "memory without a first thread",
        "import ctypes, threading, time\n"
        "def fill():\n    global x\n    x = bytearray(b'x') * (60 << 20)\n    f = open('/tmp/x', 'wb')\n"
        "    for _ in range(90): f.write(b'x' * (1 << 20))\n    print('ESCAPED', flush=True)\n    time.sleep(99)\n"
        "threading.Thread(target=fill).start()\nctypes.CDLL(None).pthread_exit(None)",
        "SIGKILL|used more than 128 MB",
    ),
    Attack(
        "pages in pipes",
        "import ctypes, os\nfile, size = os.pipe()[1], 4096\npart = (ctypes.c_size_t * 2)(id(bytearray(size)), 8)\n"
        "print(ctypes.CDLL(None).vmsplice(file, part, 1, 0))",
        "^None\n-1\n$",
    ),
    Attack(
        "open files of each thread",
        "import ctypes, os\nprint(ctypes.CDLL(None).close_range(10_000, 10_001, 2))",  # CLOSE_RANGE_UNSHARE
        "^None\n-1\n$",
    ),
    Attack(
        "events of files",
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint([libc.inotify_init(), libc.inotify_init1(0)])",
        r"\[-1, -1\]",
    ),
    Attack(
        "lists of users of a file",
        "import os, struct\nusers = [(2, 7, user) for user in range(99)]\n"
        "entries = [(1, 7, -1), *users, *((tag, 7, -1) for tag in (4, 16, 32))]\n"
        "value = struct.pack('I', 2) + b''.join(struct.pack('HHi', *entry) for entry in entries)\n"
        "os.mkdir('/tmp/d')\nos.setxattr('/tmp/d', 'system.posix_acl_default', value)\nprint('ESCAPED')",
        DENIED,
    ),
    Attack(
        "places of the machine for input and output",
        "import ctypes, os\nnumber = 206 if os.uname().machine == 'x86_64' else 0\n"
        "print(ctypes.CDLL(None).syscall(number, 10, ctypes.byref(ctypes.c_ulong())))",  # io_setup
        "^None\n-1\n$",
    ),
    Attack(
        "files of the machine",  # written to its disks, and taken from its memory
        "import ctypes, os\nprint(ctypes.CDLL(None).syncfs(os.open('/usr/lib', 0)))\n"
        "os.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED)\nprint('ESCAPED')",
        DENIED,
    ),
    *(
        Attack(
            f"{name} of files",
            f"import fcntl, os\nfcntl.fcntl(os.open('/tmp', 0), {command}, {value})\nprint('ESCAPED')",
            DENIED,
        )
        for name, command, value in (("watch", 1026, 1), ("leases", 1024, 0))
    ),
    *(
        Attack(f"times of a file by {call}", f"import ctypes, os\n{code}", f"{DENIED}|^None\n-1\n$")
        for call, code in {
            "path": "os.utime('/tmp')\nprint('ESCAPED')",
            "number": "os.utime(os.open('/tmp/x', os.O_CREAT))\nprint('ESCAPED')",
            # utime, utimes and futimesat of x86_64; other machines have the fourth call alone
            "older calls": "call = ctypes.CDLL(None).syscall\nold = os.uname().machine == 'x86_64'\n"
            "print(max([call(132, b'/tmp', 0), call(235, b'/tmp', 0), call(261, -100, b'/tmp', 0)] if old else [-1]))",
        }.items()
    ),
    *(
        Attack(f"pages of files in memory by {call}", f"import ctypes, mmap, os\n{code}", held)
        for call, code, held in (
            (
                "preadv2",
                "print(os.preadv(os.open(os.__file__, 0), [bytearray(9)], 0, os.RWF_NOWAIT), 'ESCAPED')",
                "Operation not supported",
            ),
            ("mincore", "print(ctypes.CDLL(None).mincore(None, 0, None))", "^None\n-1\n$"),
            (
                "move_pages",
                "print(ctypes.CDLL(None).syscall(279 if os.uname().machine == 'x86_64' else 239, 0, 0, 0, 0, 0, 0))",
                "^None\n-1\n$",
            ),
            ("readahead", "print(ctypes.CDLL(None).readahead(os.open(os.__file__, 0), 0, 4096))", "^None\n-1\n$"),
            (
                "madvise",
                "file = os.open(os.__file__, 0)\nmmap.mmap(file, 9, mmap.MAP_PRIVATE, 1).madvise(21)\nprint('ESCAPED')",
                DENIED,
            ),
        )
    ),
    Attack(
        "image of the memory",
        "import ctypes, resource as r\nprint(ctypes.CDLL(None).prctl(4, 1, 0, 0, 0), r.getrlimit(r.RLIMIT_CORE))",
        r"0 \(1, 1\)",  # of one byte: the kernel then starts no program of the machine that takes it
    ),
    Attack(
        "memory of many processes",
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: x = bytearray(b'x' * (60 << 20)); time.sleep(99)\n"
        "time.sleep(99)",
        NO_PROCESSES,
    ),
    Attack("memory without a name", "import os\nos.memfd_create('x')\nprint('ESCAPED')", "PermissionError"),
    Attack("memory at once", "x = 'a' * 10**9", "MemoryError", MEMORY),
    Attack(
        "half memory, half disk",
        "open('/tmp/x', 'wb').write(b'x' * (90 << 20))\nx = bytearray(b'x') * (90 << 20)\nimport time\ntime.sleep(99)",
        "used more than 128 MB",
        "PermissionError",
    ),
    Attack(
        "memory in sockets",
        "import socket\nx = []\nwhile True:\n    x.append(socket.socketpair())\n    x[-1][0].setblocking(False)\n"
        "    try:\n        while True: x[-1][0].send(bytes(1 << 16))\n    except BlockingIOError: pass",
        "Too many open files",
    ),
    Attack(
        "System V memory",
        "import ctypes\nc = ctypes.CDLL(None)\n"
        "print([c.shmget(0, 1 << 20, 0o1600), c.msgget(0, 0o1600), c.semget(0, 4, 0o1600)])",
        r"\[-1, -1, -1\]",
    ),
    Attack(
        "memory of the kernel",
        "import ctypes\nbuffer = ctypes.create_string_buffer(120)\ncall = ctypes.CDLL(None).syscall\n"
        "print([call(425, 8, buffer), call(447, 0)])  # io_uring_setup, memfd_secret",
        r"\[-1, -1\]",
    ),
    Attack(
        "full disk",
        "with open('/tmp/x', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))",
        "used more than 128 MB|No space",
        "PermissionError",
    ),
    Attack(
        "many files",
        "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close()\n    i += 1",
        "made more than 4096 files",
        "PermissionError",
    ),
    Attack("loop", "while True: pass", TIME, TIME),
    Attack(
        "loop that catches everything",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        TIME,
        TIME,
    ),
    Attack("output", "while True: print('x' * 100)", "printed more than 5000", "printed more than 5000"),
    Attack("one long line", "print('x' * 10**7)", "printed more than 5000", "printed more than 5000"),
    Attack("recursion", "def f(n): return f(n + 1)\nf(0)", "RecursionError", "RecursionError"),
    Attack(
        "recursion without a limit",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        r"^(?!None\n)",  # any error: it depends on where memory or the stack ends inside CPython
    ),
    Attack("nested list", "x = []\nfor _ in range(10**5): x = [x]\nx", "RecursionError", r"RecursionError|\[\["),
    Attack("regular expression", "import re\nprint(re.match('(a+)+$', 'a' * 40 + 'b'))", TIME, "None"),
    Attack("sleep", "import time\ntime.sleep(10**6)\nprint('on')", TIME, "on"),
    Attack("input", "input()", "EOFError"),
    Attack("stopped process", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", TIME),
]
RESULTS = [
    Attack("closed descriptors", "import os\nos.closerange(0, 5000)\nprint('x')", r"exit code 1"),
    Attack(
        "forged messages",
        "import os\nfor number in range(3, 1100):\n"
        "    try: os.write(number, bytes(4) + b'\\0' * 500)\n    except OSError: pass\nprint(40 + 2)",
        "42|^None",
    ),
    Attack(
        "forged length",
        "import os\nfor number in range(3, 1100):\n"
        "    try: os.write(number, b'\\xff' * 500)\n    except OSError: pass\nprint(40 + 2)",
        f"42|{TIME}",
    ),
    Attack(
        "forged result",
        "import os\nfor number in range(3, 254):\n"
        "    try: os.write(number, b'\\0\\1\\0\\0\\0\\0\\3\\0\\0\\0\\0lie')\n    except OSError: pass\n"
        "print(40 + 2)",
        r"^None\n42\n$",
    ),
    Attack("lying repr", "class A:\n    def __repr__(self): return 'lie'\nA()", "lie", "lie"),
    Attack("looping repr", "class A:\n    def __repr__(self):\n        while True: pass\nA()", TIME, TIME),
    Attack("raising repr", "class A:\n    def __repr__(self): return 1 / 0\nA()", "ZeroDivision", "ZeroDivision"),
    Attack("repr that is no text", "class A:\n    def __repr__(self): return 7\nA()", "TypeError", "TypeError"),
    Attack("huge repr", "class A:\n    def __repr__(self): return 'x' * 10**6\nA()", "printed more", "printed more"),
    Attack("exit", "exit()", "NameError|SystemExit"),
    Attack("SystemExit", "raise SystemExit(3)", "SystemExit: 3", "RuntimeError|SystemExit"),
    Attack("KeyboardInterrupt", "raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
    Attack("os._exit", "import os\nprint('x', flush=True)\nos._exit(0)", r"exit code 0"),
    Attack("abort", "import os\nos.abort()", "SIGABRT"),
    *(
        Attack(f"signal {number}", f"import os\nos.kill(os.getpid(), {number})", rf"signal {name}\)")
        for number, name in ((34, "SIGRTMIN"), (40, r"SIGRTMIN\+6"), (63, r"SIGRTMIN\+29"))
    ),
    Attack("long message", "raise ValueError('x' * 10**7)", "ValueError: xxx", "ValueError: xxx"),
    Attack(
        "looping message",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        TIME,
        f"E$|{TIME}|{ABSENT}",
    ),
    Attack(
        "raising message", "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", "E: ", rf"E\b|{ABSENT}"
    ),
    Attack("false timeout", "raise TimeoutError('took longer')", "TimeoutError: took longer", "TimeoutError: took"),
    Attack("terminal escapes", "print('\\x1b[2J\\x07\\r\\x9b1m')", r"\\x1b\[2J\\x07\n\\x9b1m", r"\\x1b\[2J\\x07"),
    Attack("invalid UTF-8", "import sys\nsys.stdout.buffer.write(b'a\\xff\\xfe\\xc0b\\n')", "a.*b"),
    Attack("half characters", "print('a\\ud800b')", r"a.*b", "a.*b"),
    Attack("no standard output", "import sys\nsys.stdout = None\nprint('x')\n1", "AttributeError|None|lost"),
    Attack("display hook", "import sys\nsys.displayhook = lambda x: print('mine')\n1", "mine"),
    Attack("trace function", "import sys\nsys.settrace(lambda *a: 1 / 0)\n(lambda: 1)()", "ZeroDivisionError"),
]
LEFT_BEHIND = [
    Attack(
        "threads left behind",
        "import threading\nthreading.Thread(target=lambda: [print('x') for _ in iter(int, 1)], daemon=True).start()",
        r"^None|printed more",
    ),
    Attack(
        "daemon left behind",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: print('late')\n"
        "    os._exit(0)",
        NO_PROCESSES,
    ),
    Attack("forked copy of the run", "import os\nos.fork()\nprint('x')", NO_PROCESSES),
    Attack("exit handler", "import atexit\natexit.register(lambda: [0 for _ in iter(int, 1)])", r"^None"),
    Attack("builtins", "import builtins\nbuiltins.print = builtins.repr = builtins.len = None", r"^None|exit code 1"),
    Attack("modules", "import sys, os\nsys.modules.clear()\nos.write = None", r"^None|exit code 1"),
    Attack(
        "key for the next run",
        "import ctypes, platform\nnumber = {'x86_64': 248, 'aarch64': 217}[platform.machine()]\n"
        "print(ctypes.CDLL(None).syscall(number, b'user', b'note', b'x', 1, -4))",
        "-1",
    ),
    *(
        Attack(f"{name} of process 1", f"import os, resource, ctypes\n{code}", f"{NO_PROCESSES}|-1")
        for name, code in {
            "address space": "resource.prlimit(1, resource.RLIMIT_AS, (100 << 20, 100 << 20))",
            "open files": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
            "processor time": "resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
            "priority": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
            "priorities": "os.setpriority(os.PRIO_USER, 0, 19)",
            "processors": "os.sched_setaffinity(1, {0})",
            "schedule": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
            "disk priority": "call = 251 if os.uname().machine == 'x86_64' else 30\n"
            "print(ctypes.CDLL(None).syscall(call, 1, 1, 3 << 13))",  # ioprio_set
        }.items()
    ),
    Attack("variable", "leaked = 'ESCAPED'", r"^None", r"^None"),
    Attack(
        "file left behind",
        "open('/tmp/note', 'w').write('x')\nimport os\nos.chmod('/tmp', 0)",
        "^None|Operation not permitted",
        "PermissionError",
    ),
]
TEXT = [
    Attack("long code", "x = 1\n" * 10**5, "more than 100000", "more than 100000"),
    Attack(
        "long expression",
        "x = " + "1+" * 40_000 + "1",
        r"^None|RecursionError|MemoryError|SIGSEGV",
        "SyntaxError|^None",
    ),
    Attack("brackets", "(" * 50_000, "SyntaxError|MemoryError", "SyntaxError"),
    Attack("minus signs", "-" * 50_000 + "1", "RecursionError|MemoryError|SIGSEGV", "SyntaxError|RecursionError"),
    Attack("null byte", "x = 1\0\nprint(x)", "ValueError|SyntaxError", "SyntaxError"),
    Attack("syntax error", "def f(:\n", "SyntaxError", "SyntaxError"),
    Attack("half a character", "print('a\ud800b')", "a.*b", "a.*b"),
    Attack("byte order mark", "\ufeffprint(40 + 2)", "42|SyntaxError", "42|SyntaxError"),
    Attack("look-alike letters", "рrint = 1\nprint(40 + 2)", "42", "42"),
    Attack("letters of another width", "ｐｒｉｎｔ(40 + 2)", "42", "42|NameError"),
    Attack("text direction", "x = '\u202e' + 'abc'\nprint(len(x))", "4", "4"),
    Attack("line separators", "x = 'a\u2028b\x85c'\nx", "a", "a"),
    Attack("carriage returns", "x = 40\rprint(x + 2)", "42", "42"),
    Attack("only a comment", "# nothing", r"^None", r"^None"),
    Attack("nothing", "", r"^None", r"^None"),
]
ESCAPES = [
    Attack(
        "subclasses",
        "classes = ().__class__.__base__.__subclasses__()\n"
        "[wrap] = [c for c in classes if c.__name__ == '_wrap_close']\n"
        "print(wrap.__init__.__globals__['popen']('cat /etc/passwd').read() or 1 / 0, 'ESCAPED')",
        NO_PROCESSES,
        bare=True,
    ),
    Attack(
        "frames",
        "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
        "print(frame.f_globals['os'].environ.get('TRIMTAB_SECRET'))",
        "None",
    ),
    Attack("import by name", "print(__import__('os').environ)", "HOME", "NameError|RuntimeError|os.environ"),
    Attack("format", "print('{0.__class__.__init__.__globals__}'.format(print))", "AttributeError", "Error|print"),
    Attack("evaluated text", "eval(\"__import__('os').system('touch @FOLDER@/new')\")", "-1|^None", "Error", True),
    Attack(
        "objects of the collector",
        "import gc\nfor x in gc.get_objects():\n    if type(x).__name__ == 'Supervisor': x.timeout = 10**6\n"
        "while True: pass",
        TIME,
    ),
]
ATTACKS = [*FILES, *NETWORK, *MACHINE, *EXHAUSTION, *RESULTS, *LEFT_BEHIND, *TEXT, *ESCAPES]
