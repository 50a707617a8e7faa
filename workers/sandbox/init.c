/* Process 1 of a container: runs one command at a time for the worker at the other end of its stdin and stdout.
 *
 *     init DEADLINE_S WORKDIR BASH
 *
 * A request is one byte (what to do), a 32-bit little-endian length and that number of bytes; answers have the same form. One that
 * comes while a command runs waits for its end; frames about connections (connections.c) are obeyed at any time.
 *
 *     'u' USER      run later 'r' and 'l' as another user: 32-bit numbers (id, group, number of further groups, these groups), then
 *                   the value of HOME for every later command, or nothing to leave it as it is
 *     'r' COMMAND   bash -c COMMAND in WORKDIR, stdin closed
 *     's' COMMAND   the same as root
 *     'p' COMMAND   the same as root with BASH -p and a PATH without programs of WORKDIR; TASK_PATH has the original PATH
 *     'c'           kill every other process, and reset their connections
 *     'l' SCRIPT    close the port and all connections; BASH SCRIPT in WORKDIR, then exit with its status; after the answer 'l' the
 *                   stream is the script's output
 *
 *     'o' BYTES     output of the command
 *     'e' STATUS SURVIVORS STARVED_MS   the command has ended; the number of processes that survived being killed; the time for
 *                   which the machine had no CPU for them; 32 bits each
 *
 * SIGUSR1 does the same as 'c'. This process ends with the stream, or at the deadline. Because it is process 1, it
 * adopts and reaps orphans, and no signal from within the container ends it. A command that is another user's gets that user's three
 * ids and groups before it is executed, and with them loses every capability. Its saved user is nobody's, so no process without
 * CAP_SYS_PTRACE or CAP_SYS_RESOURCE, root included, can read its memory, open its descriptors, trace it or set its limits: only
 * using up the container's memory ends it.
 *
 * While the last script runs, NOTES is a pipe, the side channel: what processes write there goes to descriptor 9. When the
 * script has ended, every other process is killed; a line with the status, the CPU time (ns) and the time without a CPU (ms)
 * ends the notes, and this process ends with the same status.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connections.h"
#include "frames.h"
#include "starvation.h"

enum {
    END_BYTES = 12,
    PIECE_BYTES = 64 * 1024,              /* a pipe's own size */
    LONGEST_ARGUMENT_BYTES = 128 * 1024 - 1, /* MAX_ARG_STRLEN, less its NUL */
    FIRST_CONNECTION = 3, /* indices in `watched` */
    FIRST_OLD = FIRST_CONNECTION + NUM_WATCHED,
    OLD_PIPES = 64,
    REQUESTS_AT_ONCE = 64,
    KILL_ROUNDS = 1000, /* a process may be stuck in the kernel for seconds, writing to a slow disk */
    KILL_PAUSE_US = 20 * 1000,
    SIDE_CHANNEL = 9,
    SCRIPT_FD = 3,
    SAVED_USER = 65534,
    MOST_GROUPS = 1024,
    MOST_PIECES = 16, /* pieces of the notes that are read at once: more than the pipe holds */
    LOOK_MS = 500, /* pause between two calls of look() while a command runs */
    LOST = 121,    /* status of this process when its stream or its time ends; never 0, which would be a script's success */
};
#define NOTES "/dev/swerve-notes"
#define MOST_NOTES_BYTES ((size_t)64 << 20) /* later bytes are discarded */
static const char STANDARD_PATH[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

static double deadline_at; /* seconds */
static const char *workdir, *bash;
static char *plain_path, *task_path; /* PATH=..., TASK_PATH=... */
static sigset_t blocked;
static int signals, nothing;             /* descriptors: signalfd, /dev/null */
static pid_t running;                    /* the current command, or 0 */
static struct {
    int is_set; /* otherwise every command is root's */
    uid_t id;
    gid_t group, others[MOST_GROUPS];
    size_t num_others;
} user;
static int status, survivors;
static struct {
    unsigned char header[HEADER_BYTES];
    char *body;
    uint32_t length; /* length of the body */
    size_t got;      /* number of bytes received of header and body */
    int is_whole;
} request;
/* stdin, signals, the command's output, connections, output of processes that outlived their command */
static struct pollfd watched[FIRST_OLD + OLD_PIPES];
static int num_old;
static unsigned char piece[HEADER_BYTES + PIECE_BYTES + HEADER_BYTES + END_BYTES];

/* Any process in the container may send the signal. */
static void on_alarm(int signal) {
    (void)signal;
    double left_s = deadline_at - now();
    if (left_s <= 0) _exit(LOST);
    alarm((unsigned)left_s + 1);
}

static void send_to(int stream, const void *bytes, size_t length) {
    for (size_t sent = 0; sent < length;) {
        ssize_t wrote = write(stream, (const char *)bytes + sent, length - sent);
        if (wrote > 0) sent += (size_t)wrote;
        else if (errno != EINTR) _exit(LOST);
    }
}

void send_bytes(const void *bytes, size_t length) { send_to(STDOUT_FILENO, bytes, length); }

/* The frame 'e'. */
static size_t put_end(unsigned char *at) {
    uint32_t numbers[3] = {(uint32_t)status, (uint32_t)survivors, starved_ms()};
    put_header(at, 'e', END_BYTES);
    for (int i = 0; i < END_BYTES / 4; i++) put_number(at + HEADER_BYTES + 4 * i, numbers[i]);
    return HEADER_BYTES + END_BYTES;
}

static void reap(void) {
    int how;
    for (pid_t ended; (ended = waitpid(-1, &how, WNOHANG)) > 0;) {
        if (ended != running) continue;
        running = 0;
        status = WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
    }
}

static int num_others(void) {
    DIR *proc = opendir("/proc");
    if (!proc) return -1;
    int count = -1; /* this process */
    for (struct dirent *entry; (entry = readdir(proc));)
        count += entry->d_name[0] >= '1' && entry->d_name[0] <= '9';
    closedir(proc);
    return count;
}

static void kill_all(void) {
    for (int round = 0; round < KILL_ROUNDS; round++) {
        int gone = kill(-1, SIGKILL) < 0 && errno == ESRCH;
        reap();
        if (gone) break;
        if (round) usleep(KILL_PAUSE_US);
    }
    reap();
    survivors = kill(-1, 0) < 0 && errno == ESRCH ? 0 : num_others();
    reset_connections(); /* unread bytes that a killed process has sent are dropped */
}

/* Waits for events, and looks at the machine in the meantime. */
static int wait_for(struct pollfd *events, nfds_t count) {
    int ready = poll(events, count, running ? LOOK_MS : -1);
    if (running) look(LOOK_MS / 1e3);
    return ready;
}

/* Gives this process the user's ids, and its output to the user, who may open it by its name in /dev or /proc. Returns whether it could. */
static int switch_user(int output) {
    if (fchown(output, user.id, user.group)) errno = 0; /* a stream of the Docker host may have another owner */
    return !setgroups(user.num_others, user.others) && !setresgid(user.group, user.group, user.group) &&
           !setresuid(user.id, user.id, user.id);
}

/* Runs between vfork and exec, so it changes nothing in the parent but its own stack frame. */
static void become(char kind, char *const arguments[], int script, int output, char **environment) {
    signal(SIGPIPE, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    sigprocmask(SIG_UNBLOCK, &blocked, NULL);
    setpgid(0, 0);
    dup2(nothing, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    if (script >= 0) dup2(script, SCRIPT_FD);
    if (chdir(workdir)) {
        dprintf(STDERR_FILENO, "bash: cd: %s: %s\n", workdir, strerror(errno));
        _exit(1);
    }
    if (user.is_set && (kind == 'r' || kind == 'l') && !switch_user(output)) {
        dprintf(STDERR_FILENO, "bash: cannot become user %u: %s\n", (unsigned)user.id, strerror(errno));
        _exit(126);
    }
    if (kind == 'r' || kind == 's') execvpe("bash", arguments, environment);
    else execve(bash, arguments, environment);
    dprintf(STDERR_FILENO, "bash: %s\n", strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static char **plain_environment(void) {
    static char *variables[4096];
    int count = 0;
    for (char **variable = environ; *variable && count < 4093; variable++)
        if (strncmp(*variable, "PATH=", 5)) variables[count++] = *variable;
    variables[count++] = plain_path;
    variables[count++] = task_path;
    variables[count] = NULL;
    return variables;
}

static void start(char kind, char *command, uint32_t length, int output) {
    char *name = kind == 'r' || kind == 's' ? "bash" : (char *)bash;
    char *short_one[] = {name, kind == 'p' ? "-pc" : "-c", command, NULL};
    char *long_one[] = {name, kind == 'p' ? "-p" : "--", "/dev/fd/3", NULL};
    char *last_one[] = {name, command, NULL};
    int script = -1;
    if (kind != 'l' && length > LONGEST_ARGUMENT_BYTES) {
        script = memfd_create("command", MFD_CLOEXEC);
        for (uint32_t written = 0; script >= 0 && written < length;) {
            ssize_t wrote = write(script, command + written, length - written);
            if (wrote <= 0) break;
            written += (uint32_t)wrote;
        }
    }
    char *const *arguments = kind == 'l' ? last_one : script >= 0 ? long_one : short_one;
    char **environment = kind == 'p' ? plain_environment() : environ;
    begin_looking();
    running = vfork();
    if (running == 0) become(kind, arguments, script, output, environment);
    if (running < 0) { /* no process can be created: answer with the text and status that bash itself would give */
        running = 0;
        status = 254;
        dprintf(output, "bash: fork: %s\n", strerror(errno));
    }
    if (script >= 0) close(script);
}

/* Discard the output of processes that outlived their command. */
static void retire_output(void) {
    struct pollfd *output = &watched[2];
    if (output->fd < 0) return;
    if (num_old == OLD_PIPES) {
        close(watched[FIRST_OLD].fd);
        memmove(&watched[FIRST_OLD], &watched[FIRST_OLD + 1], sizeof(watched[0]) * --num_old);
    }
    watched[FIRST_OLD + num_old++] = *output;
    output->fd = -1;
}

static void drain_old(void) {
    for (int i = 0; i < num_old; i++) {
        struct pollfd *old = &watched[FIRST_OLD + i];
        if (!old->revents) continue;
        ssize_t got = read(old->fd, piece, PIECE_BYTES);
        if (got > 0 || (got < 0 && errno == EAGAIN)) continue;
        close(old->fd);
        *old = watched[FIRST_OLD + --num_old];
        old->revents = 0;
        i--;
    }
}

static void pass_output_on(void) {
    struct pollfd *output = &watched[2];
    ssize_t got = read(output->fd, piece + HEADER_BYTES, PIECE_BYTES);
    if (got > 0) {
        put_header(piece, 'o', (uint32_t)got);
        send_bytes(piece, HEADER_BYTES + (size_t)got);
    } else if (got == 0) {
        close(output->fd);
        output->fd = -1;
    }
}

/* Pass on everything that the command printed before its end, without waiting for later output of its daemons. */
static void tell_end(void) {
    size_t length = 0;
    int waiting = 0;
    if (watched[2].fd >= 0 && !ioctl(watched[2].fd, FIONREAD, &waiting) && waiting > 0) {
        ssize_t got;
        while (waiting > PIECE_BYTES) {
            pass_output_on();
            waiting -= PIECE_BYTES;
        }
        got = read(watched[2].fd, piece + HEADER_BYTES, (size_t)waiting);
        if (got > 0) length = put_header(piece, 'o', (uint32_t)got) + (size_t)got;
    }
    length += put_end(piece + length);
    retire_output();
    send_bytes(piece, length);
}

static int open_notes(void) {
    unlink(NOTES);
    if (mkfifo(NOTES, 0622) || chmod(NOTES, 0622)) return -1;
    return open(NOTES, O_RDWR | O_NONBLOCK | O_CLOEXEC);
}

/* Passes on the present content of the pipe. */
static void pass_notes_on(int notes) {
    static size_t left = MOST_NOTES_BYTES;
    for (int pieces = 0; pieces < MOST_PIECES; pieces++) {
        ssize_t got = read(notes, piece, PIECE_BYTES);
        if (got <= 0) return;
        size_t passed = (size_t)got < left ? (size_t)got : left;
        send_to(SIDE_CHANNEL, piece, passed);
        left -= passed;
    }
}

/* Returns whether `body` is in the format of 'u'. */
static int set_user(const char *body, uint32_t length) {
    const unsigned char *numbers = (const unsigned char *)body;
    uint32_t num_numbers = 3;
    if (length < 4 * num_numbers) return 0;
    user.num_others = get_number(numbers + 8);
    if (user.num_others > MOST_GROUPS) return 0;
    num_numbers += (uint32_t)user.num_others;
    if (length < 4 * num_numbers) return 0;
    user.id = get_number(numbers);
    user.group = get_number(numbers + 4);
    for (size_t i = 0; i < user.num_others; i++) user.others[i] = get_number(numbers + 12 + 4 * i);
    if (body[4 * num_numbers] && setenv("HOME", body + 4 * num_numbers, 1)) return 0;
    user.is_set = 1;
    return 1;
}

static void run_last(char *script, uint32_t length) {
    unsigned char answer[HEADER_BYTES];
    end_connections(); /* only the script writes to the stream after this */
    send_bytes(answer, put_header(answer, 'l', 0));
    int notes = open_notes();
    start('l', script, length, STDOUT_FILENO);
    while (running) {
        struct signalfd_siginfo signal;
        struct pollfd ends[3] = {{STDIN_FILENO, 0, 0}, {signals, POLLIN, 0}, {notes, POLLIN, 0}};
        if (wait_for(ends, 3) < 0) continue;
        if (ends[0].revents) _exit(LOST);
        if (ends[1].revents && read(signals, &signal, sizeof(signal)) > 0 && signal.ssi_signo == SIGUSR1) kill_all();
        if (ends[2].revents) pass_notes_on(notes);
        reap();
    }
    kill_all(); /* so that no process writes after the end */
    pass_notes_on(notes);
    dprintf(SIDE_CHANNEL, "\nend %d %llu %u\n", status, cpu_ns(), starved_ms());
    _exit(status);
}

static void run(char kind, char *command, uint32_t length) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) _exit(1);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    watched[2].fd = ends[0];
    survivors = 0;
    start(kind, command, length, ends[1]);
    close(ends[1]);
    if (!running) tell_end();
}

/* Returns the number of bytes that were available, without waiting for more. */
static size_t read_some(void *bytes, size_t length) {
    ssize_t got = read(STDIN_FILENO, bytes, length);
    if (got > 0) return (size_t)got;
    if (got == 0 || (errno != EAGAIN && errno != EINTR)) _exit(LOST);
    return 0;
}

static int is_of_commands(char kind) { return memchr("urspcl", kind, 6) != NULL; }

/* The end of a malformed request is unknown, so the stream cannot be used any more. */
static void open_request(void) {
    char kind = (char)request.header[0];
    request.length = get_number(request.header + 1);
    if (!is_of_commands(kind) && (!is_of_connections(kind) || request.length > MOST_CARRIED_BYTES)) _exit(LOST);
    request.body = malloc((size_t)request.length + 1);
    if (!request.body) _exit(1);
}

/* Reads the available part of a request. Output and connections do not wait for the rest of it. */
static void read_request(void) {
    if (request.got < HEADER_BYTES) {
        request.got += read_some(request.header + request.got, HEADER_BYTES - request.got);
        if (request.got < HEADER_BYTES) return;
        open_request();
    }
    size_t got = request.got - HEADER_BYTES;
    if (got < request.length) request.got += read_some(request.body + got, request.length - got);
    request.is_whole = request.got == HEADER_BYTES + (size_t)request.length;
}

static void obey_request(void) {
    char kind = (char)request.header[0], *body = request.body;
    body[request.length] = '\0';
    request.got = 0;
    request.is_whole = 0;
    if (is_of_connections(kind)) {
        if (!take_frame(kind, (unsigned char *)body, request.length)) _exit(LOST);
    } else if (kind == 'l') run_last(body, request.length);
    else if (kind == 'c' || kind == 'u') {
        unsigned char answer[HEADER_BYTES + END_BYTES];
        status = 0;
        begin_looking();
        if (kind == 'c') kill_all();
        else if (!set_user(body, request.length)) _exit(LOST);
        send_bytes(answer, put_end(answer));
    } else run(kind, body, request.length);
    free(body);
}

static void take_signals(void) {
    struct signalfd_siginfo signal;
    pid_t before = running;
    /* At most one signal of each kind is pending, SIGUSR1 first. New ones arrive endlessly while processes fork and die. */
    for (int kind = 0; kind < 2 && read(signals, &signal, sizeof(signal)) > 0; kind++) {
        if (signal.ssi_signo == SIGUSR1) kill_all();
        else reap();
    }
    if (before && !running) tell_end();
}

/* Obeys the requests that have arrived, a command only when no other runs, and a limited number, so that output gets its turn. */
static void take_requests(int is_readable) {
    for (int turn = 0; turn < REQUESTS_AT_ONCE; turn++) {
        if (!request.is_whole && is_readable) read_request();
        if (!request.is_whole) return;
        if (is_of_commands((char)request.header[0])) {
            take_signals(); /* a signal to kill everything that was sent before this command must not kill it */
            if (running) return;
        }
        obey_request();
    }
}

static void prepare_path(void) {
    const char *path = getenv("PATH");
    size_t length = strlen(workdir);
    char *copy = strdup(path ? path : ""), *rest = copy, *entry;
    task_path = malloc(sizeof("TASK_PATH=") + strlen(copy));
    strcpy(task_path, "TASK_PATH=");
    strcat(task_path, copy);
    plain_path = malloc(sizeof("PATH=") + sizeof(STANDARD_PATH) + strlen(copy) + 1);
    strcpy(plain_path, "PATH=");
    strcat(plain_path, STANDARD_PATH);
    while ((entry = strsep(&rest, ":"))) {
        int within = !strncmp(entry, workdir, length) && (entry[length] == '/' || !entry[length]);
        if (*entry != '/' || within) continue;
        strcat(plain_path, ":");
        strcat(plain_path, entry);
    }
    free(copy);
}

static void prepare(void) {
    struct sigaction at_alarm = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    setresuid((uid_t)-1, (uid_t)-1, SAVED_USER);
    prctl(PR_SET_DUMPABLE, 0);
    nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup3(STDERR_FILENO, SIDE_CHANNEL, O_CLOEXEC);
    dup3(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO, O_CLOEXEC);
    fcntl(STDIN_FILENO, F_SETFD, FD_CLOEXEC);
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGALRM, &at_alarm, NULL);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    signals = signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK);
    on_alarm(SIGALRM);
    prepare_path();
}

int main(int num_arguments, char **arguments) {
    if (num_arguments != 4) return 2;
    unlink(arguments[0]);
    deadline_at = now() + atof(arguments[1]);
    workdir = arguments[2];
    bash = arguments[3];
    prepare();
    watched[0] = (struct pollfd){STDIN_FILENO, POLLIN, 0};
    watched[1] = (struct pollfd){signals, POLLIN, 0};
    watched[2] = (struct pollfd){-1, POLLIN, 0};
    send_bytes("init\n", 5);
    for (;;) {
        watched[0].events = request.is_whole ? 0 : POLLIN; /* poll reports a hang-up anyway */
        watch_connections(&watched[FIRST_CONNECTION]);
        if (wait_for(watched, FIRST_OLD + (nfds_t)num_old) < 0) continue;
        if (watched[2].fd >= 0 && watched[2].revents) pass_output_on();
        serve_connections(&watched[FIRST_CONNECTION]);
        if (watched[1].revents) take_signals();
        if (watched[0].revents && !(watched[0].revents & POLLIN)) _exit(LOST);
        take_requests(watched[0].revents & POLLIN);
        drain_old();
    }
}
