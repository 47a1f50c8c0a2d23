/* Starts one job: the last few system calls between the supervisor's posix_spawn and the command.
 *
 *   launch UID GID CWD KEEP -- PROGRAM ARGUMENT...
 *
 * Inherited: 0, 1, 2 the command's own streams; 3 the job's cgroup.procs; 4 a pipe that reports a failure as
 * "OPERATION ERRNO" and otherwise closes at the exec; 5 the directory that CWD lies beneath; 6 kept for the
 * command when KEEP is 1. UID -1 keeps the caller's rights (a supervisor that is not root).
 *
 * Static and free of Python, because a fork of the interpreter costs more under emulation than all of this.
 * It decides nothing and returns nothing: it becomes the command or exits with 127.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CGROUP_FD = 3, REPORT_FD = 4, ROOT_FD = 5, KEPT_FD = 6 };

static void fail(const char *operation)
{
    char text[64];
    int length = snprintf(text, sizeof text, "%s %d", operation, errno);
    if (write(REPORT_FD, text, (size_t)length) < 0)
        _exit(126);
    _exit(127);
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        fail("oom_score_adj");
    close(fd);
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

static void drop_rights(long uid, long gid)
{
    if (uid < 0)
        return;
    /* While still root: also sets the floor below which the job cannot lower it again. */
    write_file("/proc/self/oom_score_adj", "0");
    if (setgroups(0, NULL) != 0 || setresgid((gid_t)gid, (gid_t)gid, (gid_t)gid) != 0 ||
        setresuid((uid_t)uid, (uid_t)uid, (uid_t)uid) != 0)
        fail("setuid");
}

/* As the job's own user, so that its rights decide; beneath the root, so that no symlink leads out. */
static void enter(const char *cwd)
{
    struct open_how how = {
        .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    int fd = (int)syscall(SYS_openat2, ROOT_FD, cwd, &how, sizeof how);
    if (fd < 0 || fchdir(fd) != 0)
        fail("cwd");
}

int main(int argc, char **argv)
{
    if (argc < 7 || strcmp(argv[5], "--") != 0) {
        errno = EINVAL;
        fail("arguments");
    }
    if (write(CGROUP_FD, "0", 1) != 1)
        fail("cgroup");
    if (setsid() < 0)
        fail("setsid");
    reset_process();
    drop_rights(atol(argv[1]), atol(argv[2]));
    enter(argv[3]);
    int kept = strcmp(argv[4], "1") == 0;
    fcntl(REPORT_FD, F_SETFD, FD_CLOEXEC);
    close(CGROUP_FD);
    close(ROOT_FD);
    syscall(SYS_close_range, kept ? KEPT_FD + 1 : KEPT_FD, ~0U, 0);
    if (kept) {
        /* Lowest free number, out of the way of scripts that use 3 and up by hand: bash itself uses 10 and up. */
        dup2(KEPT_FD, 9);
        close(KEPT_FD);
    }
    execve(argv[6], argv + 6, environ);
    fail("exec");
}
