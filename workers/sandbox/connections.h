/* Connections of the container's processes to one port of its loopback, which the worker answers. */
#include <poll.h>
#include <stdint.h>

enum {
    NUM_CONNECTIONS = 64,
    NUM_WATCHED = 1 + NUM_CONNECTIONS, /* the port, then the connections */
    WINDOW_BYTES = 24 * 1024,          /* bytes that may wait in this process for each connection's reader */
    MOST_CARRIED_BYTES = 1 + WINDOW_BYTES, /* body of a frame from the worker: the connection and its bytes */
};

/* Whether frames of this kind are about connections. */
int is_of_connections(char kind);

/* Obeys a frame of such a kind from the worker; returns 0 if it is malformed. */
int take_frame(char kind, const unsigned char *body, uint32_t length);

/* Sets the events to wait for, in NUM_WATCHED entries. */
void watch_connections(struct pollfd *ends);

/* Does the work that needs no waiting, according to poll's results in these entries. */
void serve_connections(const struct pollfd *ends);

/* Every process of the container has been killed: resets all connections, including those that nobody has accepted. */
void reset_connections(void);

/* Closes the port and all connections, and sends nothing about them. */
void end_connections(void);
