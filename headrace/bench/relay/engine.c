/* A stand-in for inference engines: answers with paced streams that cost it next to nothing, so that what is measured
 * is the proxy in front of it.
 *
 * One thread, epoll, HTTP/1.1 with keep-alive. It speaks the OpenAI API (chat completions and completions) and, as an
 * LLM-API model of Triton's, generate_stream. Numbers in a request say what its answer is, found by a search of the
 * bytes under either API's names for them:
 *   max_tokens (sampling_param_max_tokens, or max_completion_tokens if a proxy renames it)  number of chunks
 *   seed (sampling_param_seed)              microseconds between two chunks
 *   prefill_us                              microseconds before the first, of a stream with time between them
 *
 * A chunk's text is "@SSSSS:NNNNNNNNNNNNNNNNNNN": its number in the answer, and CLOCK_MONOTONIC in nanoseconds when it
 * was written, so that a client on this machine sees what is missing and how long a chunk took. Triton's text is
 * cumulative and its pieces are "@SSSSS ", about a token long.
 *
 * Each stream has a clock of its own, as the streams of a fleet have: waiting in whole milliseconds would bunch chunks of
 * many streams, and a proxy is cheaper by a third when it wakes for a bunch. The head shares a write with the first
 * chunk, the end of the body with the last. */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MODEL "bench"
#define TRITON_MODEL "llmapi"
#define MAX_CHUNKS 99999
#define REQUEST_LIMIT (8 << 20)
#define READ_BYTES (64 << 10)
#define PIECE 7 /* bytes of a cumulative piece, "@SSSSS " */

enum api { CHAT, COMPLETIONS, TRITON };

struct connection {
    int fd;
    int place;   /* in the heap; -1: waits for no moment */
    int64_t due; /* ns */
    int64_t delay;
    int chunks, sent;
    enum api api;
    bool answering, streams, usage, closes;
    char *in; /* the request so far, ended by a zero byte */
    size_t in_length, in_size, request_length;
    char *out; /* what the socket did not take */
    size_t out_length;
};

static int poller;
static struct connection **connections; /* by descriptor */
static struct connection **heap;        /* by `due`, the earliest first */
static int heap_length;
static char *cumulative; /* the text of Triton's longest answer */
static char line[1 << 20]; /* where a write is put together; holds a cumulative event */
static size_t line_length;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* --- the heap of streams that wait for their next chunk --- */

static void put(int place, struct connection *connection) {
    heap[place] = connection;
    connection->place = place;
}

static void settle(int place, struct connection *connection) {
    while (place > 0 && heap[(place - 1) / 2]->due > connection->due) {
        put(place, heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        int child = 2 * place + 1;
        if (child + 1 < heap_length && heap[child + 1]->due < heap[child]->due) child++;
        if (child >= heap_length || heap[child]->due >= connection->due) break;
        put(place, heap[child]);
        place = child;
    }
    put(place, connection);
}

static void wait_until(struct connection *connection, int64_t due) {
    connection->due = due;
    settle(connection->place >= 0 ? connection->place : heap_length++, connection);
}

static void wait_no_more(struct connection *connection) {
    int place = connection->place;
    if (place < 0) return;
    connection->place = -1;
    struct connection *last = heap[--heap_length];
    if (last != connection) settle(place, last);
}

/* --- putting a write together --- */

static void add(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void add(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + line_length, sizeof line - line_length, format, arguments);
    va_end(arguments);
    if (length < 0 || line_length + length >= sizeof line) abort(); /* answers have a limit, see MAX_CHUNKS */
    line_length += length;
}

/* A chunk's size line comes before a payload whose length is known after it: room is left and the rest moved up. */
#define SIZE_ROOM 10 /* "xxxxxxxx\r\n" */

static size_t begin_chunk(void) {
    size_t start = line_length;
    line_length += SIZE_ROOM;
    return start;
}

static void end_chunk(size_t start) {
    char size[SIZE_ROOM + 1];
    size_t payload = line_length - start - SIZE_ROOM;
    int length = snprintf(size, sizeof size, "%zx\r\n", payload);
    memcpy(line + start, size, length);
    memmove(line + start + length, line + start + SIZE_ROOM, payload);
    line_length = start + length + payload;
    add("\r\n");
}

static void add_usage(const struct connection *connection) {
    add("\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,\"completion_tokens\":%d}", connection->request_length / 4,
        connection->request_length / 4 + connection->chunks, connection->chunks);
}

static void add_opening(const struct connection *connection, const char *suffix) {
    bool chat = connection->api == CHAT;
    add("{\"id\":\"%s-bench\",\"object\":\"%s%s\",\"created\":1700000000,\"model\":\"" MODEL "\",",
        chat ? "chatcmpl" : "cmpl", chat ? "chat.completion" : "text_completion", chat ? suffix : "");
}

static void add_text(int number) {
    add("@%05d:%019lld", number, (long long)now_ns());
}

static void add_openai_event(const struct connection *connection, int number) {
    const char *end = number + 1 == connection->chunks ? "\"stop\"" : "null";
    add("data: ");
    add_opening(connection, ".chunk");
    if (connection->api == CHAT) {
        add("\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"", number == 0 ? "\"role\":\"assistant\"," : "");
        add_text(number);
        add("\"},\"logprobs\":null,\"finish_reason\":%s}]}\n\n", end);
    } else {
        add("\"choices\":[{\"index\":0,\"text\":\"");
        add_text(number);
        add("\",\"logprobs\":null,\"finish_reason\":%s}]}\n\n", end);
    }
}

static void add_event(const struct connection *connection, int number) {
    size_t start = begin_chunk();
    if (connection->api == TRITON)
        add("data: {\"model_name\":\"" TRITON_MODEL "\",\"model_version\":\"1\",\"text_output\":\"%.*s\"}\n\n",
            (number + 1) * PIECE, cumulative);
    else
        add_openai_event(connection, number);
    end_chunk(start);
}

static void add_end(const struct connection *connection) {
    if (connection->api != TRITON) {
        if (connection->usage) {
            size_t start = begin_chunk();
            add("data: ");
            add_opening(connection, ".chunk");
            add("\"choices\":[],");
            add_usage(connection);
            add("}\n\n");
            end_chunk(start);
        }
        size_t start = begin_chunk();
        add("data: [DONE]\n\n");
        end_chunk(start);
    }
    add("0\r\n\r\n");
}

static void add_whole_body(const struct connection *connection) {
    if (connection->api == TRITON) {
        add("{\"model_name\":\"" TRITON_MODEL "\",\"model_version\":\"1\",\"text_output\":\"%.*s\"}",
            connection->chunks * PIECE, cumulative);
        return;
    }
    add_opening(connection, "");
    add("\"choices\":[{\"index\":0,");
    add(connection->api == CHAT ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    for (int number = 0; number < connection->chunks; number++) add("@%05d ", number);
    add(connection->api == CHAT ? "\"}," : "\",");
    add("\"logprobs\":null,\"finish_reason\":\"stop\"}],");
    add_usage(connection);
    add("}");
}

static void add_answer(const char *status, const char *body, size_t length) {
    add("HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status, length);
    if (line_length + length > sizeof line) abort();
    memcpy(line + line_length, body, length);
    line_length += length;
}

/* --- connections --- */

static void watch(struct connection *connection, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0), .data.fd = connection->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

static void drop(struct connection *connection) {
    wait_no_more(connection);
    connections[connection->fd] = NULL;
    close(connection->fd);
    free(connection->in);
    free(connection->out);
    free(connection);
}

/* False: the connection is gone. */
static bool flush_line(struct connection *connection) {
    size_t length = line_length;
    line_length = 0;
    ssize_t taken = send(connection->fd, line, length, MSG_NOSIGNAL);
    if (taken < 0 && errno != EAGAIN) {
        drop(connection);
        return false;
    }
    if (taken < 0) taken = 0;
    if ((size_t)taken < length) {
        connection->out_length = length - taken;
        connection->out = malloc(connection->out_length);
        memcpy(connection->out, line + taken, connection->out_length);
        watch(connection, true);
    }
    return true;
}

static void next_request(struct connection *connection);

static void finished(struct connection *connection) {
    connection->answering = false;
    if (connection->closes) {
        shutdown(connection->fd, SHUT_WR);
        return; /* the other side closes then, and is heard to */
    }
    size_t rest = connection->in_length - connection->request_length;
    if (rest == 0) {
        free(connection->in); /* thousands of idle connections need no buffers */
        connection->in = NULL;
        connection->in_size = 0;
    } else {
        memmove(connection->in, connection->in + connection->request_length, rest + 1);
    }
    connection->in_length = rest;
    connection->request_length = 0;
    next_request(connection);
}

/* Write what is due. Streams without a delay go on until the socket takes no more. */
static void go_on(struct connection *connection) {
    while (connection->answering && connection->out_length == 0) {
        if (connection->sent == connection->chunks) {
            finished(connection);
            return;
        }
        if (connection->delay && now_ns() < connection->due) {
            wait_until(connection, connection->due);
            return;
        }
        if (!connection->streams) { /* the whole answer, after the time that a stream would have taken */
            static char body[sizeof line];
            add_whole_body(connection);
            size_t length = line_length;
            memcpy(body, line, length);
            line_length = 0;
            add_answer("200 OK", body, length);
            connection->sent = connection->chunks;
        } else {
            if (connection->sent == 0)
                add("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                    "transfer-encoding: chunked\r\n\r\n");
            add_event(connection, connection->sent);
            connection->sent++;
            if (connection->sent == connection->chunks) add_end(connection);
            connection->due += connection->delay;
        }
        if (!flush_line(connection)) return;
    }
}

/* --- requests --- */

static long number_in(const struct connection *connection, const char *body, const char *key, long otherwise) {
    size_t length = connection->in + connection->request_length - body;
    const char *found = memmem(body, length, key, strlen(key));
    return found ? strtol(found + strlen(key), NULL, 10) : otherwise;
}

static bool says(const struct connection *connection, const char *body, const char *key) {
    size_t length = connection->in + connection->request_length - body;
    const char *found = memmem(body, length, key, strlen(key));
    if (!found) return false;
    found += strlen(key);
    return strncmp(found + strspn(found, " "), "true", 4) == 0;
}

static bool on_path(const struct connection *connection, const char *path) {
    const char *asked = strchr(connection->in, ' ') + 1;
    size_t length = strlen(path);
    return strncmp(asked, path, length) == 0 && (asked[length] == ' ' || asked[length] == '?');
}

static void generate(struct connection *connection, enum api api, const char *body) {
    long chunks = number_in(connection, body, "max_tokens\":", 0);
    if (chunks < 1) chunks = number_in(connection, body, "max_completion_tokens\":", 1);
    connection->api = api;
    connection->chunks = chunks < 1 ? 1 : chunks > MAX_CHUNKS ? MAX_CHUNKS : chunks;
    connection->sent = 0;
    connection->delay = number_in(connection, body, "seed\":", 0) * 1000LL;
    connection->streams =
        api == TRITON ? on_path(connection, "/v2/models/" TRITON_MODEL "/generate_stream") : says(connection, body, "\"stream\":");
    connection->usage = says(connection, body, "\"include_usage\":");
    connection->answering = true;
    long prefill_us = number_in(connection, body, "prefill_us\":", 0);
    connection->due = now_ns() + (connection->streams ? prefill_us * 1000LL : connection->delay * connection->chunks);
    go_on(connection);
}

#define TENSOR(name, type) "{\"name\":\"" name "\",\"datatype\":\"" type "\",\"shape\":[1]}"
#define INPUT(name, type, optional) "{\"name\":\"" name "\",\"data_type\":\"TYPE_" type "\",\"dims\":[1],\"optional\":" optional "}"
#define OUTPUT(name, type) "{\"name\":\"" name "\",\"data_type\":\"TYPE_" type "\",\"dims\":[1]}"

static const char *documents[][2] = {
    {"/health", "{}"},
    {"/v1/models", "{\"object\":\"list\",\"data\":[{\"id\":\"" MODEL "\",\"object\":\"model\",\"created\":1700000000,"
                   "\"owned_by\":\"" MODEL "\",\"root\":\"" MODEL "\",\"max_model_len\":262144}]}"},
    {"/v2", "{\"name\":\"triton\",\"version\":\"2.71.0\",\"extensions\":[\"generate\",\"statistics\"]}"},
    {"/v2/health/ready", ""},
    {"/v2/models/" TRITON_MODEL "/ready", ""},
    {"/v2/models/" TRITON_MODEL,
     "{\"name\":\"" TRITON_MODEL "\",\"versions\":[\"1\"],\"platform\":\"python\",\"inputs\":[" TENSOR("text_input", "BYTES") ","
     TENSOR("streaming", "BOOL") "," TENSOR("sampling_param_max_tokens", "INT32") "," TENSOR("sampling_param_seed", "UINT64") ","
     TENSOR("sampling_param_exclude_input_from_output", "BOOL") "],\"outputs\":[" TENSOR("text_output", "BYTES") "]}"},
    {"/v2/models/" TRITON_MODEL "/config",
     "{\"name\":\"" TRITON_MODEL "\",\"backend\":\"python\",\"max_batch_size\":0,\"input\":[" INPUT("text_input", "STRING", "false") ","
     INPUT("streaming", "BOOL", "true") "," INPUT("sampling_param_max_tokens", "INT32", "true") ","
     INPUT("sampling_param_seed", "UINT64", "true") "," INPUT("sampling_param_exclude_input_from_output", "BOOL", "true") "],"
     "\"output\":[" OUTPUT("text_output", "STRING") "],\"model_transaction_policy\":{\"decoupled\":true}}"},
    {"/v2/models/" TRITON_MODEL "/stats",
     "{\"model_stats\":[{\"name\":\"" TRITON_MODEL "\",\"version\":\"1\",\"inference_stats\":{\"fail\":{\"count\":0,\"ns\":0}}}]}"},
};

static void answer(struct connection *connection, const char *body) {
    if (strncmp(connection->in, "POST ", 5) == 0) {
        if (on_path(connection, "/v1/chat/completions")) return generate(connection, CHAT, body);
        if (on_path(connection, "/v1/completions")) return generate(connection, COMPLETIONS, body);
        if (strncmp(connection->in + 5, "/v2/models/" TRITON_MODEL "/generate", strlen("/v2/models/" TRITON_MODEL "/generate")) == 0)
            return generate(connection, TRITON, body);
    }
    for (size_t number = 0; number < sizeof documents / sizeof *documents; number++) {
        if (!on_path(connection, documents[number][0])) continue;
        add_answer("200 OK", documents[number][1], strlen(documents[number][1]));
        if (flush_line(connection)) finished(connection);
        return;
    }
    static const char none[] = "{\"error\":{\"message\":\"no such path\",\"type\":\"not_found\"}}";
    add_answer("404 Not Found", none, sizeof none - 1);
    if (flush_line(connection)) finished(connection);
}

static void refuse(struct connection *connection, const char *status) {
    add_answer(status, "", 0);
    connection->closes = true;
    if (flush_line(connection)) finished(connection);
}

/* Answer the request that `in` begins with, once it is complete. */
static void next_request(struct connection *connection) {
    if (connection->in_length == 0 || connection->answering) return;
    char *end = memmem(connection->in, connection->in_length, "\r\n\r\n", 4);
    if (!end) return;
    if (connection->request_length == 0) {
        *end = 0; /* the searches below are for strings in the head */
        const char *length = strcasestr(connection->in, "\r\ncontent-length:");
        const char *close = strcasestr(connection->in, "\r\nconnection: close");
        bool chunked = strcasestr(connection->in, "\r\ntransfer-encoding:") != NULL;
        *end = '\r';
        if (chunked || strchr(connection->in, ' ') == NULL) return refuse(connection, "411 Length Required");
        connection->closes = close != NULL;
        long body = length ? strtol(length + strlen("\r\ncontent-length:"), NULL, 10) : 0;
        if (body < 0 || body > REQUEST_LIMIT) return refuse(connection, "413 Content Too Large");
        connection->request_length = end + 4 - connection->in + body;
    }
    if (connection->in_length >= connection->request_length) answer(connection, end + 4);
}

static void readable(struct connection *connection) {
    size_t wanted = connection->in_length + READ_BYTES;
    if (wanted < connection->request_length) wanted = connection->request_length;
    if (connection->in_size < wanted + 1) {
        connection->in_size = wanted + 1;
        connection->in = realloc(connection->in, connection->in_size);
    }
    ssize_t got = recv(connection->fd, connection->in + connection->in_length, wanted - connection->in_length, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return drop(connection);
    if (got < 0) return;
    connection->in_length += got;
    connection->in[connection->in_length] = 0;
    next_request(connection);
}

static void writable(struct connection *connection) {
    ssize_t taken = send(connection->fd, connection->out, connection->out_length, MSG_NOSIGNAL);
    if (taken < 0 && errno != EAGAIN) return drop(connection);
    if (taken <= 0) return;
    connection->out_length -= taken;
    if (connection->out_length) {
        memmove(connection->out, connection->out + taken, connection->out_length);
        return;
    }
    free(connection->out);
    connection->out = NULL;
    watch(connection, false);
    go_on(connection);
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
        if (fd < 0) return;
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *connection = calloc(1, sizeof *connection);
        connection->fd = fd;
        connection->place = -1;
        connections[fd] = connection;
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static int listen_on(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16384)) {
        perror("the engine cannot listen");
        exit(1);
    }
    return listener;
}

int main(int count, char **arguments) {
    if (count != 2) {
        fprintf(stderr, "usage: %s PORT\n", arguments[0]);
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_max > 1 << 20) files.rlim_max = 1 << 20;
    connections = calloc(files.rlim_max, sizeof *connections);
    heap = calloc(files.rlim_max, sizeof *heap);
    cumulative = malloc((size_t)MAX_CHUNKS * PIECE + 1);
    for (int number = 0; number < MAX_CHUNKS; number++) sprintf(cumulative + number * PIECE, "@%05d ", number);

    poller = epoll_create1(0);
    int listener = listen_on(atoi(arguments[1]));
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    struct epoll_event events[256];
    for (;;) {
        int64_t left = heap_length ? heap[0]->due - now_ns() : 0;
        if (left < 0) left = 0;
        struct timespec timeout = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        int ready = epoll_pwait2(poller, events, 256, heap_length ? &timeout : NULL, NULL);
        for (int number = 0; number < ready; number++) {
            int fd = events[number].data.fd;
            if (fd == listener) {
                accept_all(listener);
                continue;
            }
            if (connections[fd] && events[number].events & EPOLLOUT) writable(connections[fd]);
            if (connections[fd] && events[number].events & ~EPOLLOUT) readable(connections[fd]);
        }
        int64_t now = now_ns();
        while (heap_length && heap[0]->due <= now) {
            struct connection *due = heap[0];
            wait_no_more(due);
            go_on(due);
        }
    }
}
