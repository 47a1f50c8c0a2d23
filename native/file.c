/* Sharing a file's blocks. The errno is the answer: microvm/host/reflink.py names it. */
#include "shim.h"

#include <errno.h>
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
