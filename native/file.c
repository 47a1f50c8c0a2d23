/* What Python's os module lacks for files. The errno is the answer: microvm/host names it. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

/* Makes destination's content source's, sharing every block. 0, or the errno.
 * Source: ioctl_ficlone(2). Interrupted calls are repeated: a clone is all or nothing. */
int mvm_ficlone(int destination_fd, int source_fd)
{
    int result;
    do
        result = ioctl(destination_fd, FICLONE, source_fd);
    while (result < 0 && errno == EINTR);
    return result < 0 ? errno : 0;
}

/* Writes the file's dirty pages and waits for them, without its metadata, journal or the
 * device's cache: not durable, but a later fsync or clone finds little left to do. 0, or the
 * errno. Source: sync_file_range(2). */
int mvm_flush(int fd)
{
    const unsigned write_and_wait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    int result;
    do
        result = sync_file_range(fd, 0, 0, write_and_wait);
    while (result < 0 && errno == EINTR);
    return result < 0 ? errno : 0;
}
