/* Feeds byte strings to the framing, under the sanitizers that this is compiled with.
 *
 * stdin: cases, each a native u32 length and that many bytes. Every case lies in an allocation
 * of exactly its size, so that one byte read too far is found. Prints how many cases it saw. */
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>

static void read_frames(const uint8_t *bytes, size_t length)
{
    struct mvm_frame frame = {0};
    size_t at = 0;
    while (mvm_frame_parse(bytes + at, length - at, &frame) == MVM_FRAME_WHOLE) {
        uint8_t *again = malloc(MVM_HEADER_BYTES + frame.length);
        if (mvm_frame_encode(&frame, bytes + at + MVM_HEADER_BYTES, again) != MVM_FRAME_WHOLE)
            abort();
        at += MVM_HEADER_BYTES + frame.length;
        free(again);
    }
}

static void find_hello(const uint8_t *bytes, size_t length)
{
    struct mvm_frame frame = {0};
    size_t keep_from = 0;
    if (mvm_hello_scan(bytes, length, length / 2, &keep_from, &frame) == MVM_FRAME_WHOLE)
        read_frames(bytes + keep_from, length - keep_from);
    if (keep_from > length)
        abort();
}

int main(void)
{
    uint32_t length;
    unsigned cases = 0;
    while (fread(&length, sizeof length, 1, stdin) == 1) {
        uint8_t *bytes = malloc(length);
        if (fread(bytes, 1, length, stdin) != length)
            return 1;
        read_frames(bytes, length);
        find_hello(bytes, length);
        free(bytes);
        cases++;
    }
    printf("%u\n", cases);
    return 0;
}
