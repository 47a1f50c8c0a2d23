/* Starts jobs: a small process that the supervisor keeps, so that a command costs one fork of it and one exec.
 *
 *   launch UID GID    3 a stream socket for requests   4 the directory that every CWD lies beneath
 *                     5 a pipe for outcomes              6 a memory file of SLOTS `struct forked`
 *
 * A request is a `struct request`, its descriptors with the first byte, then `bytes` of NUL-ended texts: the
 * working directory, the arguments, the environment. Descriptors: the command's 0, 1, 2; the directory of its
 * cgroup; if `kept`, one more that the command finds as 9. The child itself tells the outcome, one
 * `struct outcome`, as the last thing before the exec; if the exec then fails, another. A child that is killed
 * before tells nothing: the memory file has whose it was, written by the kernel before the child exists.
 *
 * A fork of the supervisor's interpreter, and also a program started just to become another, cost more under
 * emulation than everything else here. The child is made inside its cgroup (entering one later waits for a grace
 * period of the kernel) and as the supervisor's own (CLONE_PARENT), which reaps it. UID -1 keeps the caller's
 * rights. It decides nothing; it ends with the socket. Source: clone(2), cgroups(7).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SOCKET_FD = 3, ROOT_FD = 4, OUTCOME_FD = 5, TABLE_FD = 6, KEPT_FD = 9, ASIDE_FD = 100 };
enum { FDS_MAX = 5, SLOTS = 64 };
enum { STDIN, STDOUT, STDERR, CGROUP, KEPT };

struct request {
    uint32_t id;
    uint32_t bytes;
    uint32_t argc;
    uint32_t envc;
    uint32_t kept;
};

/* Shorter than PIPE_BUF, so that each is one piece in the pipe (pipe(7)). */
struct outcome {
    uint32_t id;
    int32_t pid;
    int32_t error; /* errno; 0 when the command begins */
    char operation[20];
};

struct forked {
    uint32_t id;
    int32_t pid;
};

static long job_uid, job_gid;
static struct forked *table;

static void tell(int fd, uint32_t id, int error, const char *operation)
{
    struct outcome outcome = {.id = id, .pid = getpid(), .error = error};
    strncpy(outcome.operation, operation, sizeof outcome.operation - 1);
    if (write(fd, &outcome, sizeof outcome) < 0)
        _exit(126);
}

/* A child on its way to the command: where it tells its outcome, and whose. */
struct child {
    int outcome_fd;
    uint32_t id;
};

static void fail(const struct child *child, const char *operation)
{
    tell(child->outcome_fd, child->id, errno, operation);
    _exit(127);
}

/* What a command may count on: no signal blocked or ignored, usual descriptor limits, no core files. */
static void reset_process(void)
{
    /* Not by signal(3), which refuses the two numbers that the C library keeps for itself; posix_spawn leaves
     * those ignored. Zeroes are SIG_DFL, no flags, no mask. */
    char fallback[64] = {0};
    sigset_t none;
    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, fallback, NULL, NSIG / 8);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct rlimit files = {1024, 65536}, core = {0, 0};
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) {
        files.rlim_max = files.rlim_cur;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    setrlimit(RLIMIT_CORE, &core);
    umask(022);
}

static void drop_rights(const struct child *child)
{
    if (job_uid < 0)
        return;
    /* While still root: also sets the floor below which the job cannot lower it again. */
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "0", 1) != 1)
        fail(child, "oom_score_adj");
    /* The cgroup bounds processes and says when it did; the kernel's limit per user is lower and says nothing.
     * It stays where it cannot be raised: in a test's process, which has no CAP_SYS_RESOURCE. */
    struct rlimit processes = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_NPROC, &processes);
    gid_t gid = (gid_t)job_gid;
    uid_t uid = (uid_t)job_uid;
    if (setgroups(0, NULL) != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0)
        fail(child, "setuid");
}

/* As the job's own user, so that its rights decide; beneath the root, so that no symlink leads out. */
static void enter(const struct child *child, const char *cwd)
{
    struct open_how how = {
        .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    int fd = (int)syscall(SYS_openat2, ROOT_FD, cwd, &how, sizeof how);
    if (fd < 0 || fchdir(fd) != 0)
        fail(child, "cwd");
}

/* In the child: becomes the command, or tells why not and exits with 127. */
static void become(const struct request *request, const int *fds, const char *cwd, char **argv, char **env)
{
    struct child child = {fcntl(OUTCOME_FD, F_DUPFD_CLOEXEC, ASIDE_FD), request->id};
    setsid();
    reset_process();
    drop_rights(&child);
    enter(&child, cwd);
    for (int number = STDIN; number <= STDERR; number++)
        if (dup2(fds[number], number) < 0)
            fail(&child, "dup2");
    syscall(SYS_close_range, STDERR + 1, ~0U, CLOSE_RANGE_CLOEXEC);
    if (request->kept && dup2(fds[KEPT], KEPT_FD) < 0)
        fail(&child, "dup2");
    tell(child.outcome_fd, child.id, 0, "");
    execve(argv[0], argv, env);
    fail(&child, "exec");
}

static int fork_into(int cgroup_fd, uint32_t id)
{
    struct forked *slot = &table[id % SLOTS];
    slot->id = id;
    slot->pid = 0;
    struct clone_args how = {
        /* With CLONE_PARENT the exit signal is this process's own. */
        .flags = CLONE_INTO_CGROUP | CLONE_PARENT | CLONE_PARENT_SETTID,
        .parent_tid = (uint64_t)(uintptr_t)&slot->pid,
        .cgroup = (uint64_t)cgroup_fd,
    };
    return (int)syscall(SYS_clone3, &how, sizeof how);
}

/* Reads exactly length bytes; 0 at the end of the socket. */
static int read_all(char *into, size_t length)
{
    while (length > 0) {
        ssize_t count = read(SOCKET_FD, into, length);
        if (count <= 0)
            return 0;
        into += count;
        length -= (size_t)count;
    }
    return 1;
}

/* The next request's header and descriptors; their number, or -1 at the end. */
static int receive(struct request *request, int *fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control;
    struct iovec part = {request, sizeof *request};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t count = recvmsg(SOCKET_FD, &message, MSG_CMSG_CLOEXEC);
    if (count <= 0 || !read_all((char *)request + count, sizeof *request - (size_t)count))
        return -1;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (rights == NULL || rights->cmsg_type != SCM_RIGHTS)
        return -1;
    int number = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(rights), (size_t)number * sizeof(int));
    return number;
}

/* Cuts NUL-ended texts into an array that ends with NULL; where the next text begins. */
static char *cut(char *at, char **into, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++, at += strlen(at) + 1)
        into[i] = at;
    into[count] = NULL;
    return at;
}

static int serve_one(void)
{
    struct request request;
    int fds[FDS_MAX];
    int number = receive(&request, fds);
    if (number < 0)
        return 0;
    char *texts = malloc(request.bytes + 1);
    char **words = malloc((request.argc + request.envc + 2) * sizeof(char *));
    if (texts == NULL || words == NULL || !read_all(texts, request.bytes))
        return 0;
    texts[request.bytes] = 0;
    char **env = words + request.argc + 1;
    cut(cut(texts + strlen(texts) + 1, words, request.argc), env, request.envc);
    int pid = fork_into(fds[CGROUP], request.id);
    if (pid == 0)
        become(&request, fds, texts, words, env);
    if (pid < 0)
        tell(OUTCOME_FD, request.id, errno, "fork");
    for (int i = 0; i < number; i++)
        close(fds[i]);
    free(texts);
    free(words);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    job_uid = atol(argv[1]);
    job_gid = atol(argv[2]);
    table = mmap(NULL, SLOTS * sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, TABLE_FD, 0);
    if (table == MAP_FAILED)
        return 1;
    syscall(SYS_close_range, OUTCOME_FD + 1, ~0U, 0);
    while (serve_one())
        continue;
    return 0;
}
