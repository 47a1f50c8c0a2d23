/* What a program in the jail sees of itself, as `key value` lines on stdout.
 *
 * probe            report and exit
 * probe pause      live until killed
 * probe exit N     exit with N
 * probe fill       write to /vm/ram until refused; report how far it came
 * probe int80      make a system call by the 32-bit ABI
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

extern char **environ;

static void list(const char *path)
{
    DIR *directory = opendir(path);
    struct dirent *entry;
    if (directory == NULL)
        return;
    while ((entry = readdir(directory)) != NULL)
        if (entry->d_name[0] != '.')
            printf("entry %s%s\n", path, entry->d_name);
    closedir(directory);
}

static void report_rights(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    int bounding = 0, ambient = 0;
    syscall(SYS_capget, &header, sets);
    for (int number = 0; number < 64; number++) {
        bounding += prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1;
        ambient += prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, number, 0, 0) == 1;
    }
    printf("caps %x %x %x %d %d\n", sets[0].effective | sets[1].effective, sets[0].permitted | sets[1].permitted,
           sets[0].inheritable | sets[1].inheritable, bounding, ambient);
    printf("ids %d %d %d %d %d\n", getuid(), geteuid(), getgid(), getegid(), getgroups(0, NULL));
    printf("no_new_privs %d\n", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    printf("seccomp %d\n", prctl(PR_GET_SECCOMP, 0, 0, 0, 0));
}

static void report_world(void)
{
    struct stat facts;
    struct utsname names;
    struct if_nameindex *interfaces = if_nameindex();
    for (int i = 0; interfaces != NULL && interfaces[i].if_name != NULL; i++)
        printf("interface %s\n", interfaces[i].if_name);
    for (int fd = 0; fd < 4096; fd++)
        if (fstat(fd, &facts) == 0)
            printf("fd %d %s\n", fd, S_ISCHR(facts.st_mode) ? "chr" : S_ISFIFO(facts.st_mode) ? "fifo" : S_ISREG(facts.st_mode) ? "reg" : "other");
    uname(&names);
    printf("host %s\n", names.nodename);
    printf("pid %d %d\n", getpid(), getsid(0) == getpid());
    for (char **variable = environ; *variable != NULL; variable++)
        printf("env %s\n", *variable);
    list("/");
    list("/dev/");
    list("/vm/");
}

static void report_signals(void)
{
    struct sigaction action;
    sigset_t blocked;
    int ignored = 0, held = 0;
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    for (int number = 1; number < 65; number++) {
        ignored += sigaction(number, NULL, &action) == 0 && action.sa_handler != SIG_DFL;
        held += sigismember(&blocked, number) == 1;
    }
    printf("signals %d %d\n", ignored, held);
}

static void try_write(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    printf("open %s %s\n", path, fd < 0 ? strerrorname_np(errno) : "ok");
    if (fd >= 0) {
        if (write(fd, "jailed", 6) != 6)
            printf("write %s %s\n", path, strerrorname_np(errno));
        close(fd);
    }
}

static void report_refusals(void)
{
    const size_t bytes = 4 << 20;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct rlimit files, core, size;
    int huge = madvise(memory, bytes, MADV_HUGEPAGE);
    printf("huge %s\n", huge < 0 ? strerrorname_np(errno) : "ok");
    int other = madvise(memory, bytes, MADV_NOHUGEPAGE);
    printf("nohuge %s\n", other < 0 ? strerrorname_np(errno) : "ok");
    try_write("/new");
    try_write("/dev/new");
    try_write("/dev/null");
    try_write("/vm/ram");
    try_write("/vm/disk");
    getrlimit(RLIMIT_NOFILE, &files);
    getrlimit(RLIMIT_CORE, &core);
    getrlimit(RLIMIT_FSIZE, &size);
    printf("limits %ld %ld %ld\n", (long)files.rlim_max, (long)core.rlim_max, (long)size.rlim_max);
}

static int fill(void)
{
    static char block[4096];
    int fd = open("/vm/ram", O_WRONLY);
    long total = 0;
    ssize_t wrote;
    signal(SIGXFSZ, SIG_IGN);
    while ((wrote = write(fd, block, sizeof block)) > 0)
        total += wrote;
    printf("filled %ld %s\n", total, strerrorname_np(errno));
    return 0;
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "";
    if (strcmp(mode, "pause") == 0)
        for (;;)
            pause();
    if (strcmp(mode, "exit") == 0)
        return atoi(arguments[2]);
    if (strcmp(mode, "fill") == 0)
        return fill();
    if (strcmp(mode, "int80") == 0) {
        int result = 20; /* getpid of the 32-bit table */
        __asm__ volatile("int $0x80" : "+a"(result));
        return 0;
    }
    report_rights();
    report_world();
    report_signals();
    report_refusals();
    return 0;
}
