"""Which system calls a server in a container may make.

An allow list in the spirit of the engine's default profile, plus the four memory policy calls that
the default gives only to SYS_NICE: numactl and vLLM's per-rank binding need them, and they reach no
further than the caller's own processes. Only the machine's native ABI is allowed, so no 32-bit
table is a way around the list. Calls that reach other namespaces, the kernel or its keys are not in
it, and neither is io_uring, which no part of vLLM uses.
"""

from __future__ import annotations

EPERM, ENOSYS = 1, 38

# CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NAMESPACES = 0x7E020000
_AF_VSOCK = 40
# The values of personality(2) that change nothing about protection.
_PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)

MEMPOLICY = ("get_mempolicy", "mbind", "move_pages", "set_mempolicy")

# What each group is for, in the order in which a server needs it.
_GROUPS: dict[str, str] = {
    "memory": """brk madvise membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap
        mprotect mremap msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
        process_mrelease remap_file_pages set_mempolicy_home_node map_shadow_stack mseal""",
    "files": """access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3
        faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat
        fcntl fdatasync flock fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64
        ioctl lchown link linkat lseek lstat mkdir mkdirat mknod mknodat name_to_handle_at
        newfstatat open openat openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2
        read readahead readlink readlinkat readv rename renameat renameat2 rmdir sendfile splice
        stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink
        unlinkat utime utimensat utimes vmsplice write writev cachestat""",
    "attributes": """fgetxattr flistxattr fremovexattr fsetxattr getxattr lgetxattr listxattr
        llistxattr lremovexattr lsetxattr removexattr setxattr""",
    "processes": """arch_prctl capget capset execve execveat exit exit_group fork getcpu getegid
        geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid
        getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill pidfd_open
        pidfd_send_signal prctl prlimit64 process_vm_readv process_vm_writev ptrace rseq
        sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
        sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr
        sched_setparam sched_setscheduler sched_yield seccomp set_robust_list get_robust_list
        set_tid_address setfsgid setfsuid setgid setgroups setpgid setpriority setregid setresgid
        setresuid setreuid setrlimit setsid setuid sysinfo times tgkill tkill uname vfork wait4
        waitid landlock_add_rule landlock_create_ruleset landlock_restrict_self""",
    "threads": "futex futex_requeue futex_wait futex_waitv futex_wake",
    "signals": """alarm pause restart_syscall rt_sigaction rt_sigpending rt_sigprocmask
        rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sigaltstack
        signalfd signalfd4""",
    "time": """adjtimex clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer
        gettimeofday nanosleep setitimer time timer_create timer_delete timer_getoverrun
        timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime""",
    "events": """epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
        eventfd2 inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy
        io_getevents io_pgetevents io_setup io_submit poll ppoll pselect6 select fanotify_mark""",
    "network": """accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom
        recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown socketpair""",
    "shared memory and queues": """mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend
        mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt
        shmget""",
    "chance": "getrandom",
}

ARCHITECTURES = {"linux/amd64": "SCMP_ARCH_X86_64", "linux/arm64": "SCMP_ARCH_AARCH64"}


def _allow(names: list[str], args: list[dict] | None = None) -> dict:
    return {"names": names, "action": "SCMP_ACT_ALLOW", **({"args": args} if args else {})}


def _compare(index: int, value: int, op: str, second: int = 0) -> dict:
    return {"index": index, "value": value, "valueTwo": second, "op": op}


def profile(platform: str) -> dict:
    """The profile as the engine reads it; `platform` is `linux/amd64` or `linux/arm64`.

    A name that a kernel or libseccomp does not know is skipped by the engine, so one list serves
    both. Raises KeyError for another platform.
    """
    plain = sorted({name for group in _GROUPS.values() for name in group.split()})
    rules = [_allow(plain), _allow(list(MEMPOLICY))]
    # No new namespaces; clone3 hides its flags in memory, so glibc is told that it is not there.
    rules.append(_allow(["clone"], [_compare(0, _NAMESPACES, "SCMP_CMP_MASKED_EQ")]))
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
    # Sockets to the hypervisor have no place in a container.
    rules.append(_allow(["socket"], [_compare(0, _AF_VSOCK, "SCMP_CMP_NE")]))
    rules += [
        _allow(["personality"], [_compare(0, value, "SCMP_CMP_EQ")]) for value in _PERSONALITIES
    ]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": [ARCHITECTURES[platform]],
        "syscalls": rules,
    }
