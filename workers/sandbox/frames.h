/* Frames between process 1 and the worker: one byte (the kind), a 32-bit little-endian length and that number of bytes. */
#include <stddef.h>
#include <stdint.h>

enum { HEADER_BYTES = 5 };

/* Sends to the worker; waits while the stream is full. */
void send_bytes(const void *bytes, size_t length);

static inline void put_number(unsigned char *at, uint32_t number) {
    for (int i = 0; i < 4; i++) at[i] = (unsigned char)(number >> (8 * i));
}

static inline uint32_t get_number(const unsigned char *at) {
    uint32_t number = 0;
    for (int i = 0; i < 4; i++) number |= (uint32_t)at[i] << (8 * i);
    return number;
}

static inline size_t put_header(unsigned char *at, char kind, uint32_t length) {
    at[0] = (unsigned char)kind;
    put_number(at + 1, length);
    return HEADER_BYTES;
}
