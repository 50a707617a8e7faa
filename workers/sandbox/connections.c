/* Connections of the container's processes to 127.0.0.1:PORT, whose bytes are sent in frames on the worker's stream.
 *
 * From the worker; CONNECTION is one byte, a number from 0 on, and other numbers have 32 bits unless noted:
 *
 *     'b' PORT BYTES         close everything, and listen on PORT unless it is 0; the worker takes BYTES of each connection before
 *                            it allows more
 *     'd' CONNECTION DATA    bytes for the container's end, not more than were allowed
 *     'h' CONNECTION         the worker sends no more; the container's end may
 *     'w' CONNECTION BYTES   the worker takes BYTES more; a frame 'd' from here counts for LEAST_COUNTED_BYTES at least
 *     'x' CONNECTION HOW     close; HOW is one byte: 0 after all bytes before it, 1 at once, as a reset
 *
 * To the worker:
 *
 *     'b' PORT ERROR               the answer; ERROR is an errno, or 0
 *     'n' CONNECTION PORT BYTES    a new one, from PORT (16 bits); it takes BYTES before it allows more
 *     'd', 'h', 'w', 'x'           as above; HOW is 1 if the connection broke or its program was killed
 *
 * A number is free again when both ends have sent 'x', so frames that cross each other are never taken for those of another
 * connection, and processes that connect and hang up endlessly make no more than NUM_CONNECTIONS connections in the time that
 * the worker takes to answer. Both ends say how much they take, because all connections and the commands share one stream: a
 * reader that does not read stops its own connection and nothing else.
 */
#define _GNU_SOURCE
#include "connections.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "frames.h"

enum {
    READ_BYTES = 64 * 1024,       /* read from one connection at a time, so that each gets its turn */
    KERNEL_BYTES = 128 * 1024,    /* unsent bytes of a connection in the kernel, which may double this */
    MOST_ALLOWED_BYTES = 1 << 30, /* limit, so that no sum overflows */
    LEAST_COUNTED_BYTES = 1024,   /* keeps a program that sends single bytes from flooding the worker with frames */
    IN_ORDER = 0,
    RESET = 1,
};

/* FREE: its number may be used. ENDING: the worker has closed it, and some bytes are still to be written. GONE: it is closed here,
 * and the worker has not confirmed that yet. */
enum state { FREE, OPEN, ENDING, GONE };

static struct connection {
    enum state state;
    int socket;
    int has_ended;          /* the program sends no more */
    int is_to_end;          /* the worker sends no more */
    uint32_t allowed;       /* bytes that the worker takes */
    uint32_t written;       /* bytes since the worker was last allowed to send more */
    uint32_t first, waiting; /* offset and number of the bytes in its buffer that its socket has not taken */
} connections[NUM_CONNECTIONS];
static unsigned char buffers[NUM_CONNECTIONS][WINDOW_BYTES];
static unsigned char carried[HEADER_BYTES + 1 + READ_BYTES];
static int listener = -1;
static uint32_t taken_by_worker;

static void tell(char kind, int number, const unsigned char *rest, size_t length) {
    unsigned char frame[HEADER_BYTES + 1 + 8];
    put_header(frame, kind, (uint32_t)(1 + length));
    frame[HEADER_BYTES] = (unsigned char)number;
    if (length) memcpy(frame + HEADER_BYTES + 1, rest, length);
    send_bytes(frame, HEADER_BYTES + 1 + length);
}

static void close_socket(int socket, int how) {
    struct linger at_once = {1, 0};
    if (how == RESET) setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(socket);
}

static void end(int number, int how) {
    struct connection *one = &connections[number];
    unsigned char said = (unsigned char)how;
    close_socket(one->socket, how);
    one->state = one->state == ENDING ? FREE : GONE;
    one->waiting = 0;
    tell('x', number, &said, 1);
}

static int is_passing(int error) { return error == EAGAIN || error == EINTR; }

/* Returns the number of bytes that the socket took, or -1 if the connection is broken and has ended. */
static ssize_t write_to(int number, const unsigned char *bytes, size_t length) {
    struct connection *one = &connections[number];
    ssize_t wrote = send(one->socket, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (wrote < 0 && !is_passing(errno)) {
        end(number, RESET);
        return -1;
    }
    if (wrote <= 0) return 0;
    one->written += (uint32_t)wrote;
    if (one->written >= WINDOW_BYTES / 2 && one->state == OPEN) {
        unsigned char allowed[4];
        put_number(allowed, one->written);
        one->written = 0;
        tell('w', number, allowed, sizeof(allowed));
    }
    return wrote;
}

/* Closes or half-closes the connection if the worker asked for that and all bytes are written. */
static void end_if_written(int number) {
    struct connection *one = &connections[number];
    if (one->waiting) return;
    if (one->state == ENDING) end(number, IN_ORDER);
    else if (one->is_to_end) shutdown(one->socket, SHUT_WR);
}

static void write_waiting(int number) {
    struct connection *one = &connections[number];
    ssize_t wrote = write_to(number, buffers[number] + one->first, one->waiting);
    if (wrote <= 0) return;
    one->first += (uint32_t)wrote;
    one->waiting -= (uint32_t)wrote;
    end_if_written(number);
}

static void take_bytes(int number, const unsigned char *bytes, size_t length) {
    struct connection *one = &connections[number];
    if (one->state != OPEN || one->is_to_end) return; /* the connection ended while the bytes were in transit */
    if (!one->waiting) {
        ssize_t wrote = write_to(number, bytes, length);
        if (wrote < 0) return;
        bytes += wrote;
        length -= (size_t)wrote;
    }
    if (length > WINDOW_BYTES - one->waiting) {
        end(number, RESET); /* more than was allowed */
        return;
    }
    if (!one->waiting) one->first = 0;
    if (one->first + one->waiting + length > WINDOW_BYTES) {
        memmove(buffers[number], buffers[number] + one->first, one->waiting);
        one->first = 0;
    }
    memcpy(buffers[number] + one->first + one->waiting, bytes, length);
    one->waiting += (uint32_t)length;
}

static void read_from(int number) {
    struct connection *one = &connections[number];
    size_t most = one->allowed < READ_BYTES ? one->allowed : READ_BYTES;
    ssize_t got = recv(one->socket, carried + HEADER_BYTES + 1, most, MSG_DONTWAIT);
    if (got > 0) {
        uint32_t counted = got < LEAST_COUNTED_BYTES ? LEAST_COUNTED_BYTES : (uint32_t)got;
        one->allowed -= counted < one->allowed ? counted : one->allowed;
        put_header(carried, 'd', (uint32_t)(1 + got));
        carried[HEADER_BYTES] = (unsigned char)number;
        send_bytes(carried, HEADER_BYTES + 1 + (size_t)got);
    } else if (got == 0) {
        one->has_ended = 1;
        tell('h', number, NULL, 0);
    } else if (!is_passing(errno)) end(number, RESET);
}

static void accept_one(void) {
    struct sockaddr_in from = {0};
    socklen_t length = sizeof(from);
    unsigned char said[6];
    int number = 0, socket = accept4(listener, (struct sockaddr *)&from, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) return;
    while (number < NUM_CONNECTIONS && connections[number].state != FREE) number++;
    if (number == NUM_CONNECTIONS) {
        close_socket(socket, RESET);
        return;
    }
    connections[number] = (struct connection){.state = OPEN, .socket = socket, .allowed = taken_by_worker};
    said[0] = (unsigned char)ntohs(from.sin_port);
    said[1] = (unsigned char)(ntohs(from.sin_port) >> 8);
    put_number(said + 2, WINDOW_BYTES);
    tell('n', number, said, sizeof(said));
}

/* Returns an errno, or 0. */
static int open_port(uint16_t port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int yes = 1, unsent = KERNEL_BYTES, error;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return errno;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)); /* accepted sockets inherit this option and the next one */
    setsockopt(listener, SOL_SOCKET, SO_SNDBUF, &unsent, sizeof(unsent));
    if (!bind(listener, (struct sockaddr *)&address, sizeof(address)) && !listen(listener, NUM_CONNECTIONS)) return 0;
    error = errno;
    close(listener);
    listener = -1;
    return error;
}

static void open_again(uint32_t port, uint32_t taken) {
    unsigned char answer[HEADER_BYTES + 8];
    end_connections();
    taken_by_worker = taken < MOST_ALLOWED_BYTES ? taken : MOST_ALLOWED_BYTES;
    put_header(answer, 'b', 8);
    put_number(answer + HEADER_BYTES, port);
    put_number(answer + HEADER_BYTES + 4, port ? (uint32_t)open_port((uint16_t)port) : 0);
    send_bytes(answer, sizeof(answer));
}

static void close_connection(int number, int how) {
    struct connection *one = &connections[number];
    if (one->state == GONE) one->state = FREE;
    if (one->state == FREE) return;
    one->state = ENDING;
    if (how == RESET) end(number, RESET);
    else end_if_written(number);
}

int is_of_connections(char kind) { return memchr("bdhwx", kind, 5) != NULL; }

int take_frame(char kind, const unsigned char *body, uint32_t length) {
    if (kind == 'b') {
        if (length != 8 || get_number(body) > UINT16_MAX) return 0;
        open_again(get_number(body), get_number(body + 4));
        return 1;
    }
    if (!length || body[0] >= NUM_CONNECTIONS) return 0;
    int number = body[0];
    struct connection *one = &connections[number];
    switch (kind) {
    case 'd':
        take_bytes(number, body + 1, length - 1);
        return 1;
    case 'h':
        if (one->state == OPEN && !one->is_to_end) {
            one->is_to_end = 1;
            end_if_written(number);
        }
        return length == 1;
    case 'w':
        if (length != 5) return 0;
        if (get_number(body + 1) > MOST_ALLOWED_BYTES - one->allowed) one->allowed = MOST_ALLOWED_BYTES;
        else one->allowed += get_number(body + 1);
        return 1;
    default:
        if (length != 2) return 0;
        close_connection(number, body[1]);
        return 1;
    }
}

void watch_connections(struct pollfd *ends) {
    ends[0] = (struct pollfd){listener, POLLIN, 0};
    for (int number = 0; number < NUM_CONNECTIONS; number++) {
        struct connection *one = &connections[number];
        int events = one->waiting ? POLLOUT : 0;
        if (one->state == OPEN && !one->has_ended && one->allowed) events |= POLLIN;
        /* Not watched without events: poll would repeatedly report a hang-up that cannot be handled yet. */
        ends[1 + number] = (struct pollfd){events ? one->socket : -1, (short)events, 0};
    }
}

void serve_connections(const struct pollfd *ends) {
    for (int number = 0; number < NUM_CONNECTIONS; number++) {
        const struct pollfd *seen = &ends[1 + number];
        struct connection *one = &connections[number];
        if (!seen->revents) continue;
        if (one->waiting && seen->revents & ~POLLIN) write_waiting(number);
        if (one->state == OPEN && seen->events & POLLIN && seen->revents & ~POLLOUT) read_from(number);
    }
    if (ends[0].revents) accept_one();
}

void reset_connections(void) {
    for (int number = 0; number < NUM_CONNECTIONS; number++)
        if (connections[number].state == OPEN || connections[number].state == ENDING) end(number, RESET);
    if (listener < 0) return;
    for (int turn = 0; turn <= NUM_CONNECTIONS; turn++) { /* a process that survives may connect again and again */
        int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (socket < 0) return;
        close_socket(socket, RESET);
    }
}

void end_connections(void) {
    if (listener >= 0) close(listener);
    listener = -1;
    for (int number = 0; number < NUM_CONNECTIONS; number++) {
        struct connection *one = &connections[number];
        if (one->state == OPEN || one->state == ENDING) close_socket(one->socket, RESET);
        one->state = FREE;
        one->waiting = 0;
    }
}
