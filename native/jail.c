/* The one way in which a VMM (or another untrusted tool) is started.
 *
 * Everything that can be prepared is prepared by the parent: the mounts exist, with their
 * flags, before clone3, as detached trees held by descriptors. The child only moves them
 * into place, gives everything up, and executes. Between clone3 and execve it makes system
 * calls and nothing else: the daemon has threads, and one of them may hold any lock that
 * libc has (signal-safety(7)).
 *
 * The child borrows the parent's memory until execve, as posix_spawn's does (CLONE_VM and
 * CLONE_VFORK, on a stack of its own): copying page tables took 8 ms of a daemon with 90 MiB,
 * against 1 ms in all without. So it writes to its stack and to report_fd only.
 *
 * No policy: who, what, where and how much are arguments. Must be called on the main
 * thread, since PR_SET_PDEATHSIG follows the *thread* that cloned (prctl(2));
 * microvm/host/process.py checks it.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef __x86_64__
#error "the jail's filter and the service's machines are x86-64"
#endif

/* sys/mount.h and linux/mount.h exclude each other in glibc 2.36; these are its values. */
enum { MOUNT_PRIVATE = 1 << 18, MOUNT_RECURSIVE = 1 << 14, UNMOUNT_DETACH = 2 };

enum { FIRST_FD = 3, FAILED_BEFORE_EXEC = 125 };

/* What the child must not work out for itself. */
struct plan {
    const struct mvm_jail *jail;
    int root_tree;
    int dev_tree;
    int bind_trees[MVM_JAIL_BINDS_MAX];
    int null_fd;
    int report_read;
    int report_write;
};

/* Sent whole through the report pipe. The pointer is to a string literal, which has the
 * same address in parent and child. */
struct report {
    const char *operation;
    int error;
};

/* ---- raw system calls: glibc has wrappers for these only since 2.36 ---- */

static int sys_open_tree(int fd, unsigned flags)
{
    return (int)syscall(SYS_open_tree, fd, "", flags | AT_EMPTY_PATH);
}

static int sys_mount_setattr(int fd, uint64_t set)
{
    struct mount_attr attributes = {.attr_set = set};
    return (int)syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes);
}

static int sys_move_mount(int from_fd, int to_fd, const char *path)
{
    return (int)syscall(SYS_move_mount, from_fd, "", to_fd, path, MOVE_MOUNT_F_EMPTY_PATH);
}

static int sys_fsconfig(int fs_fd, unsigned command, const char *key, const char *value)
{
    return (int)syscall(SYS_fsconfig, fs_fd, command, key, value, 0);
}

/* ---- the parent's side: detached mounts ---- */

static int fail(struct mvm_spawned *spawned, const char *operation)
{
    spawned->error = errno;
    spawned->operation = operation;
    return -1;
}

static int make_node(int dir_fd, const char *name, dev_t device)
{
    if (mknodat(dir_fd, name, S_IFCHR | 0666, device) < 0)
        return -1;
    return fchmodat(dir_fd, name, 0666, 0); /* the process's umask is not ours to change */
}

static int fill_dev(int dir_fd, int with_kvm)
{
    struct stat kvm;
    if (make_node(dir_fd, "null", makedev(1, 3)) < 0 || make_node(dir_fd, "zero", makedev(1, 5)) < 0 ||
        make_node(dir_fd, "urandom", makedev(1, 9)) < 0)
        return -1;
    if (!with_kvm)
        return 0;
    return stat("/dev/kvm", &kvm) < 0 ? -1 : make_node(dir_fd, "kvm", kvm.st_rdev);
}

/* A read-only tmpfs with the devices, attached nowhere. */
static int make_dev_tree(int with_kvm, struct mvm_spawned *spawned)
{
    int tree = -1;
    int fs_fd = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (fs_fd < 0)
        return fail(spawned, "fsopen tmpfs");
    if (sys_fsconfig(fs_fd, FSCONFIG_SET_STRING, "size", "64k") < 0 ||
        sys_fsconfig(fs_fd, FSCONFIG_SET_STRING, "nr_inodes", "16") < 0 ||
        sys_fsconfig(fs_fd, FSCONFIG_SET_STRING, "mode", "755") < 0 ||
        sys_fsconfig(fs_fd, FSCONFIG_CMD_CREATE, NULL, NULL) < 0)
        fail(spawned, "fsconfig tmpfs");
    else if ((tree = (int)syscall(SYS_fsmount, fs_fd, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)) < 0)
        fail(spawned, "fsmount tmpfs");
    close(fs_fd);
    if (tree < 0)
        return -1;
    if (fill_dev(tree, with_kvm) < 0)
        fail(spawned, "mknod in /dev");
    else if (sys_mount_setattr(tree, MOUNT_ATTR_RDONLY) < 0)
        fail(spawned, "make /dev read-only");
    else
        return tree;
    close(tree);
    return -1;
}

/* A private copy of the mount that fd lies on, rooted at what fd is, with these flags. */
static int clone_tree(int fd, uint64_t attributes, const char *operation, struct mvm_spawned *spawned)
{
    int tree = sys_open_tree(fd, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        return fail(spawned, operation);
    if (sys_mount_setattr(tree, attributes) == 0)
        return tree;
    fail(spawned, operation);
    close(tree);
    return -1;
}

static int prepare(struct plan *plan, struct mvm_spawned *spawned)
{
    const struct mvm_jail *jail = plan->jail;
    int report[2];
    if (jail->fd_count > MVM_JAIL_FDS_MAX || jail->bind_count > MVM_JAIL_BINDS_MAX) {
        errno = E2BIG;
        return fail(spawned, "count descriptors and binds");
    }
    const uint64_t closed = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
    plan->root_tree = clone_tree(jail->root_fd, closed | MOUNT_ATTR_RDONLY, "open_tree root", spawned);
    if (plan->root_tree < 0)
        return -1;
    if ((plan->dev_tree = make_dev_tree(jail->with_kvm, spawned)) < 0)
        return -1;
    for (size_t i = 0; i < jail->bind_count; i++) {
        uint64_t flags = closed | MOUNT_ATTR_NOEXEC | (jail->binds[i].read_only ? MOUNT_ATTR_RDONLY : 0);
        if ((plan->bind_trees[i] = clone_tree(jail->binds[i].fd, flags, "open_tree bind", spawned)) < 0)
            return -1;
    }
    if ((plan->null_fd = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0)
        return fail(spawned, "open /dev/null");
    if (pipe2(report, O_CLOEXEC) < 0)
        return fail(spawned, "pipe2");
    plan->report_read = report[0];
    plan->report_write = report[1];
    return 0;
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void release(struct plan *plan)
{
    close_if_open(plan->root_tree);
    close_if_open(plan->dev_tree);
    for (size_t i = 0; i < MVM_JAIL_BINDS_MAX; i++)
        close_if_open(plan->bind_trees[i]);
    close_if_open(plan->null_fd);
    close_if_open(plan->report_read);
    close_if_open(plan->report_write);
}

/* ---- the child's side: system calls only, from here to the next line like this ---- */

static int report_fd; /* the child's alone */

__attribute__((noreturn)) static void die(const char *operation)
{
    struct report report = {.operation = operation, .error = errno};
    while (write(report_fd, &report, sizeof report) < 0 && errno == EINTR)
        ;
    _exit(FAILED_BEFORE_EXEC);
}

#define MUST(operation, call)   \
    do {                        \
        if ((call) < 0)         \
            die(operation);     \
    } while (0)

/* Handlers of the parent must not run here, and what it ignores (Python: SIGPIPE, SIGXFSZ)
 * would stay ignored across execve. The parent blocked every signal before clone3. */
static void reset_signals(void)
{
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t none;
    for (int number = 1; number < NSIG; number++)
        (void)sigaction(number, &standard, NULL); /* fails for KILL and STOP: as they should be */
    sigemptyset(&none);
    MUST("sigprocmask", sigprocmask(SIG_SETMASK, &none, NULL));
}

static void enter_root(const struct plan *plan)
{
    const struct mvm_jail *jail = plan->jail;
    /* Nothing mounted below may travel back to the host. */
    MUST("make mounts private", syscall(SYS_mount, NULL, "/", NULL, MOUNT_PRIVATE | MOUNT_RECURSIVE, NULL));
    MUST("move_mount root", sys_move_mount(plan->root_tree, AT_FDCWD, "/"));
    MUST("move_mount /dev", sys_move_mount(plan->dev_tree, plan->root_tree, "dev"));
    for (size_t i = 0; i < jail->bind_count; i++)
        MUST("move_mount bind", sys_move_mount(plan->bind_trees[i], plan->root_tree, jail->binds[i].path));
    /* pivot_root(2), "pivot_root(".", ".")": the old root ends up on top, and goes. */
    MUST("fchdir root", fchdir(plan->root_tree));
    MUST("pivot_root", syscall(SYS_pivot_root, ".", "."));
    MUST("umount old root", syscall(SYS_umount2, ".", UNMOUNT_DETACH));
    MUST("chdir /", chdir("/"));
}

/* Puts the descriptors at 0, 1, 2, 3, ... First everything moves above that range, so that
 * no dup2 hits a descriptor that is still to be placed. */
static void place_descriptors(const struct plan *plan)
{
    const struct mvm_jail *jail = plan->jail;
    int above = FIRST_FD + (int)jail->fd_count;
    int moved[MVM_JAIL_FDS_MAX];
    MUST("move report", report_fd = fcntl(report_fd, F_DUPFD_CLOEXEC, above));
    int null_fd = fcntl(plan->null_fd, F_DUPFD_CLOEXEC, above);
    MUST("move /dev/null", null_fd);
    int log_fd = fcntl(jail->log_fd, F_DUPFD_CLOEXEC, above);
    MUST("move log", log_fd);
    for (size_t i = 0; i < jail->fd_count; i++)
        MUST("move descriptor", moved[i] = fcntl(jail->fds[i], F_DUPFD_CLOEXEC, above));
    MUST("place stdin", dup2(null_fd, 0));
    MUST("place stdout", dup2(log_fd, 1));
    MUST("place stderr", dup2(log_fd, 2));
    for (size_t i = 0; i < jail->fd_count; i++)
        MUST("place descriptor", dup2(moved[i], FIRST_FD + (int)i));
    /* Not closed at once: the report pipe is needed until execve, which closes it too. */
    MUST("close_range", syscall(SYS_close_range, above, ~0U, CLOSE_RANGE_CLOEXEC));
}

static void limit(int resource, uint64_t value, const char *operation)
{
    struct rlimit both = {.rlim_cur = value, .rlim_max = value};
    MUST(operation, setrlimit(resource, &both));
}

/* The session keyring would come along, and with it root's keys. A kernel may have none. */
static void leave_keyring(void)
{
    if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS)
        die("join session keyring");
}

static void drop_privileges(const struct mvm_jail *jail)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    for (int number = 0; prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0; number++)
        MUST("drop bounding set", prctl(PR_CAPBSET_DROP, number, 0, 0, 0));
    MUST("clear ambient set", prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
    /* Raw calls: glibc's would send a signal to the parent's other threads, which this
     * process does not have but whose list it inherited. */
    MUST("setgroups", syscall(SYS_setgroups, 0, NULL));
    MUST("setresgid", syscall(SYS_setresgid, jail->gid, jail->gid, jail->gid));
    MUST("setresuid", syscall(SYS_setresuid, jail->uid, jail->uid, jail->uid));
    MUST("capset", syscall(SYS_capset, &header, none));
    MUST("no_new_privs", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

/* A change of uid clears the signal, hence after it. The parent may have died before: then
 * nobody reads the report pipe any more. (getppid says 0 in a new PID namespace.) */
static void die_with_parent(void)
{
    struct pollfd reader = {.fd = report_fd, .events = 0};
    MUST("PDEATHSIG", prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    MUST("poll", poll(&reader, 1, 0));
    if (reader.revents & POLLERR)
        _exit(FAILED_BEFORE_EXEC);
}

/* EINVAL to madvise(MADV_HUGEPAGE), as a kernel without huge pages says: guest RAM in huge
 * folios of a file is dirtied 2 MiB at a time. Calls by another ABI, whose numbers differ,
 * are death. Source: seccomp(2); struct seccomp_data is little endian here. */
static void install_filter(void)
{
    enum { OTHER_ABI_BIT = 0x40000000 /* __X32_SYSCALL_BIT */ };
    static const struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, OTHER_ABI_BIT, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_HUGEPAGE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {
        .len = sizeof code / sizeof code[0],
        .filter = (struct sock_filter *)(uintptr_t)code,
    };
    MUST("seccomp", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0));
}

__attribute__((noreturn)) static void run_child(const struct plan *plan)
{
    const struct mvm_jail *jail = plan->jail;
    report_fd = plan->report_write;
    close(plan->report_read); /* else this process would keep its own parent check alive */
    reset_signals();
    MUST("setsid", setsid()); /* a terminal's ^C is for the daemon */
    enter_root(plan);
    place_descriptors(plan);
    MUST("sethostname", sethostname("vm", 2));
    umask(077);
    limit(RLIMIT_CORE, 0, "limit core");
    limit(RLIMIT_NOFILE, jail->limit_nofile, "limit nofile");
    limit(RLIMIT_FSIZE, jail->limit_fsize_bytes, "limit fsize");
    leave_keyring();
    drop_privileges(jail);
    die_with_parent();
    install_filter();
    execve(jail->argv[0], (char *const *)(uintptr_t)jail->argv, (char *const *)(uintptr_t)jail->env);
    die("execve");
}

/* ---- the parent's side again ---- */

/* Main thread only, and the parent sleeps while the child is on it: one is enough. */
static uint8_t child_stack[64 << 10] __attribute__((aligned(16)));

/* clone3 whose child calls run_child(plan) on its own stack. libc has no wrapper, and its
 * syscall() cannot return on a stack without a return address. Source: syscall(2), x86-64. */
static long clone3_onto_stack(struct clone_args *arguments, const struct plan *plan)
{
    long result;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %[plan], %%rdi\n\t"
                     "call *%[child]\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone3), "D"(arguments), "S"(sizeof *arguments), [child] "r"(run_child), [plan] "r"(plan)
                     : "rcx", "r11", "cc", "memory");
    if (result >= 0)
        return result;
    errno = (int)-result;
    return -1;
}

/* Returns when the child has executed or is dead. */
static long clone_child(const struct plan *plan, int *pidfd)
{
    const struct mvm_jail *jail = plan->jail;
    struct clone_args arguments = {
        .flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_PIDFD |
                 CLONE_VM | CLONE_VFORK,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .exit_signal = SIGCHLD,
        .stack = (uint64_t)(uintptr_t)child_stack,
        .stack_size = sizeof child_stack,
    };
    if (jail->cgroup_fd >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)jail->cgroup_fd;
    }
    /* The child's change of uid makes the memory that it borrows undumpable (prctl(2)). */
    int dumpable = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0);
    long pid = clone3_onto_stack(&arguments, plan);
    if (dumpable == 1)
        (void)prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    return pid;
}

/* Nothing in the pipe: execve closed it. Otherwise the child's last words. */
static int read_report(struct plan *plan, struct mvm_spawned *spawned)
{
    struct report report;
    ssize_t got;
    close(plan->report_write);
    plan->report_write = -1;
    do
        got = read(plan->report_read, &report, sizeof report);
    while (got < 0 && errno == EINTR);
    if (got == 0)
        return 0;
    if (got == (ssize_t)sizeof report) {
        spawned->operation = report.operation;
        spawned->error = report.error;
    } else {
        fail(spawned, "read report");
    }
    while (waitpid(spawned->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    close(spawned->pidfd);
    spawned->pid = spawned->pidfd = -1;
    return -1;
}

/* Starts argv[0] in the jail. 0: spawned->pid and pidfd are the caller's, execve happened.
 * -1: nothing is left, spawned->operation and error say what failed. */
int mvm_spawn_jailed(const struct mvm_jail *jail, struct mvm_spawned *spawned)
{
    struct plan plan;
    sigset_t all, previous;
    memset(&plan, -1, sizeof plan);
    plan.jail = jail;
    *spawned = (struct mvm_spawned){.pid = -1, .pidfd = -1};
    if (prepare(&plan, spawned) < 0) {
        release(&plan);
        return -1;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    long pid = clone_child(&plan, &spawned->pidfd);
    int result = 0;
    if (pid < 0) {
        spawned->pidfd = -1;
        result = fail(spawned, "clone3");
    }
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    spawned->pid = (int)pid;
    if (result == 0)
        result = read_report(&plan, spawned);
    release(&plan);
    return result;
}
