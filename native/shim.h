/* What the shim offers to Python: one declaration per line of promise.
 *
 * `build.py` hands this very text to cffi, so it holds declarations only: lines
 * that begin with '#' are dropped there. Mechanism lives here, decisions do not:
 * every value that somebody could want to choose is an argument.
 * Neighbours: microvm/host (files, clock, processes) and microvm/wire/framing.py.
 */
#ifndef MICROVM_SHIM_H
#define MICROVM_SHIM_H

#include <stddef.h>
#include <stdint.h>

/* ---- frame.c: framing of the guest channel (pure, no I/O) ---- */

enum mvm_frame_limit {
    MVM_HEADER_BYTES = 20,
    MVM_PAYLOAD_MAX = 32768,
    MVM_HELLO_MAX = 4096
};

/* Results of mvm_frame_parse; the negative ones name what is wrong. */
enum mvm_frame_state {
    MVM_FRAME_WHOLE = 1,
    MVM_FRAME_PARTIAL = 0,
    MVM_FRAME_BAD_MAGIC = -1,
    MVM_FRAME_BAD_KIND = -2,
    MVM_FRAME_BAD_FLAGS = -3,
    MVM_FRAME_BAD_STREAM = -4,
    MVM_FRAME_BAD_LENGTH = -5,
    MVM_FRAME_BAD_CHECKSUM = -6
};

struct mvm_frame {
    uint8_t kind;
    uint8_t flags;
    uint32_t stream;
    uint32_t length;
};

uint32_t mvm_crc32(uint32_t seed, const uint8_t *bytes, size_t length);
int mvm_frame_check(const struct mvm_frame *frame);
int mvm_frame_encode(const struct mvm_frame *frame, const uint8_t *payload, uint8_t *out);
int mvm_frame_parse(const uint8_t *bytes, size_t length, struct mvm_frame *frame);
int mvm_hello_scan(const uint8_t *bytes, size_t length, size_t seen, size_t *keep_from, struct mvm_frame *frame);

/* ---- file.c ---- */

int mvm_ficlone(int destination_fd, int source_fd);
int mvm_flush(int fd);

/* ---- clock.c ---- */

uint32_t mvm_cpuid_tsc_khz(void);
void mvm_tsc_sample(uint64_t *tsc, int64_t *monotonic_raw_ns);

/* ---- jail.c ---- */

enum mvm_jail_limit { MVM_JAIL_FDS_MAX = 64, MVM_JAIL_BINDS_MAX = 8 };

struct mvm_bind {
    int fd;           /* an open regular file */
    const char *path; /* where it appears, relative to the jail's root */
    int read_only;
};

struct mvm_jail {
    int root_fd; /* a directory, O_PATH is enough: becomes "/" */
    const char *const *argv;
    const char *const *env;
    uint32_t uid;
    uint32_t gid;
    int cgroup_fd; /* a cgroup v2 directory, or -1: stay in the caller's */
    const struct mvm_bind *binds;
    size_t bind_count;
    const int *fds; /* become 3, 4, 5, ... */
    size_t fd_count;
    int log_fd; /* becomes stdout and stderr */
    uint64_t limit_nofile;
    uint64_t limit_fsize_bytes;
    int with_kvm;
};

struct mvm_spawned {
    int pid;
    int pidfd;
    const char *operation; /* on failure: a string that lives for ever */
    int error;             /* on failure: errno */
};

int mvm_spawn_jailed(const struct mvm_jail *jail, struct mvm_spawned *spawned);

#endif
