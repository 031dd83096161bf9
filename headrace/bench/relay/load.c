/* The load: streams, one after another on each of many connections, each answer checked piece by piece.
 *
 * One thread, epoll. Pieces of an answer's text are recognised by the number the stand-in engine puts into them
 * ("@SSSSS"): an answer counts only if its numbers run from 0 to the last one, and it has [DONE] before the end of its
 * body. A time behind the number (":NNNNNNNNNNNNNNNNNNN", CLOCK_MONOTONIC in ns) tells how long the piece was on its
 * way. Answers of other engines are counted by a text that each of their pieces holds (--piece).
 *
 * The request is a file, head included; in its first run of eight # each connection puts a number of its own. Standard
 * output gets one JSON line when every connection has a stream that has begun (what a held stream costs is measured
 * then), and one with the result at the end. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HEAD_LIMIT (16 << 10)
#define READ_BYTES (256 << 10)
#define SECOND 1000000000LL
#define STAMP_DIGITS 19
#define NUMBER_DIGITS 5
#define PLACE "########"

enum reading { HEAD, SIZE, DATA, DATA_END, TRAILER };
enum looking { PIECE, NUMBER, COLON, STAMP };

struct connection {
    int fd; /* -1: closed */
    int number;
    bool connected, used, answered, retired; /* used: for a stream before this one */
    size_t sent; /* of the request */
    enum reading reading;
    char *head;
    size_t head_length;
    size_t size; /* of the chunk: read so far, then left */
    size_t trailer_line;
    enum looking looking;
    int digits;
    size_t matched;
    int64_t value;
    int pieces;
    char last[16]; /* the last bytes of the body */
};

static struct {
    int port, connections, chunks;
    int64_t streams, ramp_ms;
    double seconds, deadline; /* from when on no stream is begun; when all must be done */
    const char *piece;
} options = {.connections = 1, .chunks = 1, .streams = INT64_MAX, .seconds = 1e9, .deadline = 60};

static char *request;
static size_t request_length, place; /* of PLACE in the request */
static int poller;
static struct connection *connections;
static int64_t started, begun, good, bad, pieces, bytes;
static int open_now, most_open, running;
static char first_error[256];
static char buffer[READ_BYTES];

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

/* --- times on the way: a histogram whose buckets are 3 % wide --- */

#define STEPS 32
static int64_t histogram[64 * STEPS];

static void note_time(int64_t ns) {
    if (ns < 0) ns = 0;
    int power = ns < STEPS ? 0 : 63 - __builtin_clzll(ns) - 5;
    histogram[power * STEPS + (ns >> power)]++;
}

static double percentile_us(double share) {
    int64_t total = 0, sum = 0;
    for (int bucket = 0; bucket < 64 * STEPS; bucket++) total += histogram[bucket];
    for (int bucket = 0; bucket < 64 * STEPS; bucket++) {
        sum += histogram[bucket];
        if (total && sum >= share * total) {
            int power = bucket < 2 * STEPS ? 0 : bucket / STEPS - 1;
            return (double)((int64_t)(bucket - power * STEPS) << power) / 1000;
        }
    }
    return 0;
}

/* --- streams --- */

static void watch(struct connection *connection, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = connection};
    epoll_ctl(poller, operation, connection->fd, &event);
}

static void hang_up(struct connection *connection) {
    if (connection->fd >= 0) close(connection->fd);
    connection->fd = -1;
    free(connection->head);
    connection->head = NULL;
}

static void retire(struct connection *connection) {
    hang_up(connection);
    if (!connection->retired) running--;
    connection->retired = true;
}

/* The answer is not what it should be. The connection is not used any more: a side that is down is not hammered. */
static void fail(struct connection *connection, const char *what, const char *detail, size_t length) {
    bad++;
    if (connection->answered) open_now--;
    connection->answered = false;
    if (!*first_error) {
        snprintf(first_error, sizeof first_error, "%s%.*s", what, (int)length, detail);
        for (char *at = first_error; *at; at++)
            if (*at < ' ' || *at == '"' || *at == '\\' || *at == 127) *at = ' '; /* goes into a JSON string */
    }
    retire(connection);
}

static void send_request(struct connection *connection) {
    char number[sizeof PLACE];
    snprintf(number, sizeof number, "%08d", connection->number);
    size_t numbered = strlen(PLACE);
    struct iovec parts[3] = {
        {request, place}, {number, numbered}, {request + place + numbered, request_length - place - numbered}};
    size_t skip = connection->sent;
    for (int part = 0; part < 3; part++) {
        size_t skipped = skip < parts[part].iov_len ? skip : parts[part].iov_len;
        parts[part].iov_base = (char *)parts[part].iov_base + skipped;
        parts[part].iov_len -= skipped;
        skip -= skipped;
    }
    ssize_t taken = writev(connection->fd, parts, 3);
    if (taken < 0 && errno != EAGAIN) return fail(connection, "the request could not be sent: ", strerror(errno), 60);
    if (taken > 0) connection->sent += taken;
    watch(connection, EPOLL_CTL_MOD, connection->sent < request_length ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static void dial(struct connection *connection) {
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (connection->fd < 0) return fail(connection, "no socket: ", strerror(errno), 60);
    int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(options.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (connect(connection->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)
        return fail(connection, "no connection: ", strerror(errno), 60);
    connection->connected = connection->used = false;
    watch(connection, EPOLL_CTL_ADD, EPOLLOUT);
}

static void next_stream(struct connection *connection) {
    if (begun >= options.streams || now_ns() - started >= options.seconds * SECOND) return retire(connection);
    begun++;
    connection->sent = connection->head_length = connection->matched = 0;
    connection->pieces = 0;
    connection->reading = HEAD;
    connection->looking = PIECE;
    memset(connection->last, 0, sizeof connection->last);
    if (connection->fd < 0)
        dial(connection);
    else
        send_request(connection);
}

static void complete(struct connection *connection) {
    if (!memmem(connection->last, sizeof connection->last, "[DONE]", 6))
        return fail(connection, "an answer ended without [DONE]: ", connection->last, sizeof connection->last);
    if (connection->pieces != options.chunks) {
        char detail[64];
        snprintf(detail, sizeof detail, "%d instead of %d", connection->pieces, options.chunks);
        return fail(connection, "pieces in an answer: ", detail, sizeof detail);
    }
    good++;
    pieces += connection->pieces;
    if (connection->answered) open_now--;
    connection->answered = false;
    connection->used = true;
    next_stream(connection);
}

/* --- answers --- */

static void found_piece(struct connection *connection) {
    connection->pieces++;
    if (connection->answered) return;
    connection->answered = true;
    if (++open_now > most_open) most_open = open_now;
    static bool told;
    if (open_now == options.connections && !told) {
        told = true;
        printf("{\"open\":%d}\n", open_now);
        fflush(stdout);
    }
}

/* False: numbers are missing, or come twice. */
static bool look_at(struct connection *connection, const char *data, size_t length, int64_t now) {
    bytes += length;
    size_t kept = length < sizeof connection->last ? length : sizeof connection->last;
    memmove(connection->last, connection->last + kept, sizeof connection->last - kept);
    memcpy(connection->last + sizeof connection->last - kept, data + length - kept, kept);

    const char *piece = options.piece ? options.piece : "@";
    for (const char *at = data, *end = data + length; at < end; at++) {
        switch (connection->looking) {
        case PIECE:
            if (connection->matched == 0 && !(at = memchr(at, piece[0], end - at))) return true;
            if (*at == piece[connection->matched])
                connection->matched++;
            else
                connection->matched = *at == piece[0];
            if (piece[connection->matched]) break;
            connection->matched = connection->value = connection->digits = 0;
            if (options.piece)
                found_piece(connection);
            else
                connection->looking = NUMBER;
            break;
        case NUMBER:
            connection->value = connection->value * 10 + (*at - '0');
            if (++connection->digits < NUMBER_DIGITS) break;
            if (connection->value != connection->pieces) return false;
            found_piece(connection);
            connection->looking = COLON;
            break;
        case COLON:
            connection->looking = *at == ':' ? STAMP : PIECE;
            connection->value = connection->digits = 0;
            break;
        case STAMP:
            connection->value = connection->value * 10 + (*at - '0');
            if (++connection->digits < STAMP_DIGITS) break;
            note_time(now - connection->value);
            connection->looking = PIECE;
            break;
        }
    }
    return true;
}

/* Take up the head; the number of bytes of `data` that are its own, or -1 if the connection is given up. */
static ssize_t read_head(struct connection *connection, const char *data, size_t length) {
    size_t before = connection->head_length;
    if (before + length > HEAD_LIMIT) length = HEAD_LIMIT - before;
    connection->head = realloc(connection->head, before + length + 1);
    memcpy(connection->head + before, data, length);
    connection->head_length = before + length;
    connection->head[connection->head_length] = 0;
    char *end = strstr(connection->head, "\r\n\r\n");
    if (!end && connection->head_length < HEAD_LIMIT) return length;
    if (!end || strncmp(connection->head, "HTTP/1.1 200 ", 13) != 0 ||
        !strcasestr(connection->head, "\r\ntransfer-encoding: chunked")) {
        const char *body = end ? end + 4 : "";
        char what[80];
        snprintf(what, sizeof what, "%.*s: ", (int)strcspn(connection->head, "\r"), connection->head);
        fail(connection, what, body, strlen(body));
        return -1;
    }
    size_t own = end + 4 - connection->head - before;
    free(connection->head); /* a held stream needs no head */
    connection->head = NULL;
    connection->reading = SIZE;
    connection->size = 0;
    return own;
}

static void read_answer(struct connection *connection, const char *data, size_t length, int64_t now) {
    const char *end = data + length;
    while (data < end) {
        switch (connection->reading) {
        case HEAD: {
            ssize_t own = read_head(connection, data, end - data);
            if (own < 0) return;
            data += own;
            break;
        }
        case SIZE: {
            char c = *data++;
            int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
            if (digit >= 0) connection->size = connection->size * 16 + digit;
            if (c != '\n') break;
            connection->reading = connection->size ? DATA : TRAILER;
            connection->trailer_line = 0;
            break;
        }
        case DATA: {
            size_t part = (size_t)(end - data) < connection->size ? (size_t)(end - data) : connection->size;
            if (!look_at(connection, data, part, now))
                return fail(connection, "an answer's pieces are out of order near: ", data, part < 200 ? part : 200);
            data += part;
            connection->size -= part;
            if (connection->size == 0) connection->reading = DATA_END;
            break;
        }
        case DATA_END:
            if (*data++ == '\n') connection->reading = SIZE;
            break;
        case TRAILER: {
            char c = *data++;
            if (c == '\n' && connection->trailer_line == 0) {
                if (data < end) return fail(connection, "bytes after an answer: ", data, end - data);
                return complete(connection);
            }
            connection->trailer_line = c == '\n' ? 0 : connection->trailer_line + (c != '\r');
            break;
        }
        }
    }
}

static void ready(struct connection *connection, uint32_t events) {
    if (events & EPOLLOUT) {
        int error = 0;
        socklen_t size = sizeof error;
        if (!connection->connected) getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) return fail(connection, "no connection: ", strerror(error), 60);
        connection->connected = true;
        send_request(connection);
        return; /* what else there is, is told again */
    }
    ssize_t got = recv(connection->fd, buffer, sizeof buffer, 0);
    if (got > 0) return read_answer(connection, buffer, got, now_ns());
    if (got < 0 && errno == EAGAIN) return;
    if (got == 0 && connection->reading == HEAD && connection->head_length == 0 && connection->used) {
        hang_up(connection); /* a server may close a connection between two requests: the request goes on a new one */
        connection->sent = 0;
        return dial(connection);
    }
    fail(connection, "an answer broke off: ", got < 0 ? strerror(errno) : "closed", 60);
}

static void read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    struct stat status;
    if (!file || fstat(fileno(file), &status)) {
        perror(path);
        exit(2);
    }
    request_length = status.st_size;
    request = malloc(request_length);
    if (fread(request, 1, request_length, file) != request_length) exit(2);
    fclose(file);
    char *found = memmem(request, request_length, PLACE, strlen(PLACE));
    if (!found) {
        fprintf(stderr, "%s has no %s\n", path, PLACE);
        exit(2);
    }
    place = found - request;
}

static void read_options(int count, char **arguments) {
    static const struct option names[] = {
        {"port", 1, 0, 'p'},     {"connections", 1, 0, 'c'}, {"streams", 1, 0, 'n'}, {"seconds", 1, 0, 's'}, {"chunks", 1, 0, 'k'},
        {"deadline", 1, 0, 'd'}, {"ramp-ms", 1, 0, 'r'},     {"piece", 1, 0, 'i'},   {"request", 1, 0, 'f'}, {0}};
    for (int name; (name = getopt_long(count, arguments, "", names, NULL)) != -1;) {
        switch (name) {
        case 'p': options.port = atoi(optarg); break;
        case 'c': options.connections = atoi(optarg); break;
        case 'n': options.streams = atoll(optarg); break;
        case 's': options.seconds = atof(optarg); break;
        case 'k': options.chunks = atoi(optarg); break;
        case 'd': options.deadline = atof(optarg); break;
        case 'r': options.ramp_ms = atoll(optarg); break;
        case 'i': options.piece = optarg; break;
        case 'f': read_request(optarg); break;
        default: exit(2);
        }
    }
    if (!options.port || !request || options.connections < 1) {
        fprintf(stderr, "usage: %s --port N --request FILE [--connections N] [--streams N] [--seconds S] [--chunks N]"
                        " [--piece TEXT] [--ramp-ms N] [--deadline S]\n", arguments[0]);
        exit(2);
    }
}

static void report(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    printf("{\"streams\":%lld,\"errors\":%lld,\"first_error\":\"%s\",\"pieces\":%lld,\"bytes\":%lld,\"most_open\":%d,"
           "\"seconds\":%.6f,\"cpu_s\":%.6f,\"p50_us\":%.1f,\"p99_us\":%.1f}\n",
           (long long)good, (long long)bad, first_error, (long long)pieces, (long long)bytes, most_open,
           (now_ns() - started) / 1e9, cpu_s, percentile_us(0.5), percentile_us(0.99));
}

int main(int count, char **arguments) {
    read_options(count, arguments);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    connections = calloc(options.connections, sizeof *connections);
    running = options.connections;
    poller = epoll_create1(0);
    started = now_ns();
    struct epoll_event events[256];
    int dialled = 0;
    while (running) {
        int64_t passed_ms = (now_ns() - started) / 1000000;
        for (; dialled < options.connections && dialled * options.ramp_ms <= passed_ms * options.connections; dialled++) {
            connections[dialled].fd = -1;
            connections[dialled].number = dialled;
            next_stream(&connections[dialled]);
        }
        if (passed_ms > options.deadline * 1000) break;
        int number = epoll_wait(poller, events, 256, dialled < options.connections ? 1 : 100);
        for (int event = 0; event < number; event++) ready(events[event].data.ptr, events[event].events);
    }
    for (int number = 0; number < dialled; number++)
        if (!connections[number].retired) fail(&connections[number], "an answer was not complete at the deadline", "", 0);
    report();
    return 0;
}
