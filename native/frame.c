/* Framing of the guest channel: bytes to frames and back, nothing else.
 *
 * No allocation, no I/O, no state between calls: the caller keeps the buffer.
 * guest/framing.py says the same in Python; each is the other's oracle in the tests.
 *
 * Frame, little endian:
 *   0 magic "MVM1" | 4 kind | 5 flags | 6 zero u16 | 8 stream u32 | 12 length u32 |
 *   16 crc32 u32 over bytes 0..15 and the payload | 20 payload
 */
#include "shim.h"

#include <string.h>

static const uint8_t MAGIC[4] = {'M', 'V', 'M', '1'};

enum { HELLO = 1, OPEN = 2, DATA = 3, CREDIT = 4, CLOSE = 5, RESET = 6 };
enum { FIN = 1, CHECKED_BYTES = 16, CREDIT_BYTES = 4 };

static uint32_t crc_table[256];

/* The table is made when the library is loaded: lazily would be a race, since cffi
 * calls run without Python's lock. */
__attribute__((constructor)) static void make_crc_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ ((value & 1) ? 0xEDB88320u : 0); /* RFC 1952, section 8 */
        crc_table[i] = value;
    }
}

/* CRC-32 as zlib's; chain calls by passing the last result as seed (0 at first). */
uint32_t mvm_crc32(uint32_t seed, const uint8_t *bytes, size_t length)
{
    uint32_t value = ~seed;
    for (size_t i = 0; i < length; i++)
        value = crc_table[(value ^ bytes[i]) & 0xFF] ^ (value >> 8);
    return ~value;
}

static uint32_t load_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void store_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

/* Are these header fields allowed? MVM_FRAME_WHOLE, or what is wrong. */
int mvm_frame_check(const struct mvm_frame *frame)
{
    if (frame->kind < HELLO || frame->kind > RESET)
        return MVM_FRAME_BAD_KIND;
    if (frame->flags & ~(frame->kind == DATA ? FIN : 0))
        return MVM_FRAME_BAD_FLAGS;
    if ((frame->kind == HELLO) != (frame->stream == 0))
        return MVM_FRAME_BAD_STREAM;
    if (frame->length > (frame->kind == HELLO ? MVM_HELLO_MAX : MVM_PAYLOAD_MAX))
        return MVM_FRAME_BAD_LENGTH;
    if (frame->kind == CREDIT && frame->length != CREDIT_BYTES)
        return MVM_FRAME_BAD_LENGTH;
    return MVM_FRAME_WHOLE;
}

static uint32_t checksum(const uint8_t *header, const uint8_t *payload, uint32_t length)
{
    return mvm_crc32(mvm_crc32(0, header, CHECKED_BYTES), payload, length);
}

/* Writes header and payload to out, which has room for MVM_HEADER_BYTES + length.
 * MVM_FRAME_WHOLE, or what is wrong with the fields (then nothing is written). */
int mvm_frame_encode(const struct mvm_frame *frame, const uint8_t *payload, uint8_t *out)
{
    int state = mvm_frame_check(frame);
    if (state != MVM_FRAME_WHOLE)
        return state;
    memcpy(out, MAGIC, sizeof MAGIC);
    out[4] = frame->kind;
    out[5] = frame->flags;
    out[6] = out[7] = 0;
    store_u32(out + 8, frame->stream);
    store_u32(out + 12, frame->length);
    if (frame->length)
        memcpy(out + MVM_HEADER_BYTES, payload, frame->length);
    store_u32(out + 16, checksum(out, out + MVM_HEADER_BYTES, frame->length));
    return MVM_FRAME_WHOLE;
}

/* Reads the frame at the start of bytes. A header is judged when all of it is there,
 * the checksum when the payload is; the magic is judged byte by byte. */
int mvm_frame_parse(const uint8_t *bytes, size_t length, struct mvm_frame *frame)
{
    size_t magic = length < sizeof MAGIC ? length : sizeof MAGIC;
    if (memcmp(bytes, MAGIC, magic) != 0)
        return MVM_FRAME_BAD_MAGIC;
    if (length < MVM_HEADER_BYTES)
        return MVM_FRAME_PARTIAL;
    frame->kind = bytes[4];
    frame->flags = bytes[5];
    frame->stream = load_u32(bytes + 8);
    frame->length = load_u32(bytes + 12);
    if (bytes[6] | bytes[7])
        return MVM_FRAME_BAD_FLAGS;
    int state = mvm_frame_check(frame);
    if (state != MVM_FRAME_WHOLE)
        return state;
    if (length - MVM_HEADER_BYTES < frame->length)
        return MVM_FRAME_PARTIAL;
    if (load_u32(bytes + 16) != checksum(bytes, bytes + MVM_HEADER_BYTES, frame->length))
        return MVM_FRAME_BAD_CHECKSUM;
    return MVM_FRAME_WHOLE;
}

/* Looks for the HELLO that is complete first, anywhere in bytes.
 *
 * Every place can begin one, also inside what looks like an earlier, longer one: a
 * false candidate that never gets its last byte must not hide a true one behind it.
 * Hence the earliest *end* wins, which is also what feeding single bytes finds.
 *
 * seen: how many leading bytes earlier calls have looked at (candidates that ended
 * there have failed already and are not summed again: the work stays linear).
 * MVM_FRAME_WHOLE: *keep_from is where the HELLO begins. MVM_FRAME_PARTIAL: none yet;
 * bytes before *keep_from can be dropped, at most MVM_HEADER_BYTES + MVM_HELLO_MAX stay. */
int mvm_hello_scan(const uint8_t *bytes, size_t length, size_t seen, size_t *keep_from, struct mvm_frame *frame)
{
    size_t best_end = 0;
    *keep_from = length;
    for (size_t at = 0; at < length; at++) {
        const uint8_t *found = memchr(bytes + at, MAGIC[0], length - at);
        if (found == NULL)
            break;
        at = (size_t)(found - bytes);
        struct mvm_frame candidate;
        size_t left = length - at;
        if (left >= MVM_HEADER_BYTES) {
            size_t end = at + MVM_HEADER_BYTES + load_u32(found + 12);
            if (end <= seen || (best_end && end >= best_end))
                continue;
        }
        int state = mvm_frame_parse(found, left, &candidate);
        if (state < 0 || (left > 4 && found[4] != HELLO))
            continue;
        if (state == MVM_FRAME_WHOLE) {
            best_end = at + MVM_HEADER_BYTES + candidate.length;
            *frame = candidate;
            *keep_from = at;
        } else if (!best_end && *keep_from == length) {
            *keep_from = at;
        }
    }
    return best_end ? MVM_FRAME_WHOLE : MVM_FRAME_PARTIAL;
}
