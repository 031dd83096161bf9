/* SteadyStream and Feed, compiled. What they do, and why, is told by steady.py, which holds the same in Python; tests hold both
 * equal. The constants are taken from the Python modules that define them when this one is loaded.
 *
 * Everything runs with the interpreter's lock held, in the one thread of an event loop. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE /* memmem */
#include <Python.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>

#define BOUNDS_LIMIT 64
#define MARK_LIMIT 16
#define SIZE_DIGITS 8 /* of a chunk's size, leading zeros aside: no read is that long */

typedef struct {
    PyObject_HEAD
    PyObject *time;
    PyObject *gap_counts; /* a list of int */
    PyObject *transport;  /* NULL or None: no read is steady */
    PyObject *piece;      /* the last two steady reads, or NULL */
    PyObject *piece_before;
    double last_read;
    double gap_total;
    Py_ssize_t body_bytes;
    int descriptor;
} SteadyStream;

typedef struct {
    PyObject_HEAD
    PyObject *receiver; /* NULL or None: nobody */
} Feed;

typedef struct {
    char bytes[MARK_LIMIT];
    Py_ssize_t size;
} Mark;

static double gap_bounds[BOUNDS_LIMIT];
static Py_ssize_t gap_bounds_size;
static Mark event_end, usage_key;
static PyObject *receive_name, *write_name, *is_closing_name, *buffered_name, *data_received_name, *unasked_name;

static int
hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') return digit - '0';
    if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
    if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
    return -1;
}

/* Whether the bytes before `end` are `event_end`, and begin no earlier than `start`. */
static int
ends_event(const char *start, const char *end)
{
    return end - start >= event_end.size
        && memcmp(end - event_end.size, event_end.bytes, (size_t)event_end.size) == 0;
}

/* As `whole_chunks` in events.py: a run of complete chunks, each of them ending an event. */
static int
whole_chunks(const char *at, const char *end)
{
    if (!ends_event(at, end)) return 0; /* so there is one chunk or more to look at, and a byte to end each loop on */
    while (at < end) {
        long long size = 0;
        int digits = 0, digit;
        while (at < end && *at == '0') at++;
        for (; at < end && (digit = hex_digit(*at)) >= 0; at++) {
            if (++digits > SIZE_DIGITS) return 0;
            size = size * 16 + digit;
        }
        if (end - at < 2 || at[0] != '\r' || at[1] != '\n') return 0;
        at += 2;
        if (size + 2 > end - at || !ends_event(at, at + size + 2)) return 0;
        at += size + 2;
    }
    return 1;
}

/* As `says_usage` in accounting.py: a usage key whose value is an object. */
static int
says_usage(const char *at, const char *end)
{
    while ((at = memmem(at, (size_t)(end - at), usage_key.bytes, (size_t)usage_key.size)) != NULL) {
        at += usage_key.size;
        if (at < end && *at == '{') return 1;
        if (end - at >= 2 && at[0] == ' ' && at[1] == '{') return 1;
    }
    return 0;
}

static int
count_gap(PyObject *counts, double gap)
{
    Py_ssize_t low = 0, high = gap_bounds_size;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (gap_bounds[middle] < gap) low = middle + 1;
        else high = middle;
    }
    PyObject *count = PyList_GetItem(counts, low); /* borrowed */
    if (count == NULL) return -1;
    long long value = PyLong_AsLongLong(count);
    if (value == -1 && PyErr_Occurred()) return -1;
    count = PyLong_FromLongLong(value + 1);
    return count == NULL ? -1 : PyList_SetItem(counts, low, count);
}

/* How much of the bytes the kernel took at once: nothing if others go before them or the transport is to find out what
 * is wrong; -1 with an exception. A descriptor is its transport's until that is closing. */
static Py_ssize_t
sent_at_once(PyObject *transport, int descriptor, const char *start, Py_ssize_t size)
{
    if (descriptor < 0) return 0;
    PyObject *closing = PyObject_CallMethodNoArgs(transport, is_closing_name);
    if (closing == NULL) return -1;
    Py_DECREF(closing);
    if (closing != Py_False) return 0;
    PyObject *buffered = PyObject_CallMethodNoArgs(transport, buffered_name);
    if (buffered == NULL) return -1;
    long before = PyLong_AsLong(buffered);
    Py_DECREF(buffered);
    if (before == -1 && PyErr_Occurred()) return -1;
    if (before != 0) return 0;
    ssize_t sent = send(descriptor, start, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? 0 : (Py_ssize_t)sent;
}

static int
write_on(SteadyStream *self, PyObject *data)
{
    PyObject *transport = Py_NewRef(self->transport); /* it may be exchanged while it writes */
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    Py_ssize_t sent = sent_at_once(transport, self->descriptor, PyBytes_AS_STRING(data), size);
    PyObject *rest = NULL, *written = NULL;
    if (sent > 0 && sent < size) rest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + sent, size - sent);
    else if (sent == 0) rest = Py_NewRef(data);
    if (rest != NULL) written = PyObject_CallMethodOneArg(transport, write_name, rest);
    Py_XDECREF(rest);
    Py_XDECREF(written);
    Py_DECREF(transport);
    return sent == size || written != NULL ? 0 : -1;
}

static PyObject *
data_received(PyObject *object, PyObject *data)
{
    SteadyStream *self = (SteadyStream *)object;
    if (self->time == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a SteadyStream that was not initialised");
        return NULL;
    }
    PyObject *time = PyObject_CallNoArgs(self->time);
    if (time == NULL) return NULL;
    const char *start = NULL, *end = NULL;
    if (self->transport != NULL && self->transport != Py_None && PyBytes_Check(data)) {
        start = PyBytes_AS_STRING(data);
        end = start + PyBytes_GET_SIZE(data);
    }
    if (start == NULL || !whole_chunks(start, end) || says_usage(start, end)) {
        PyObject *arguments[] = {object, data, time};
        PyObject *result = PyObject_VectorcallMethod(receive_name, arguments, 3, NULL);
        Py_DECREF(time);
        return result;
    }
    double now = PyFloat_AsDouble(time);
    Py_DECREF(time);
    if (now == -1.0 && PyErr_Occurred()) return NULL;
    double gap = now - self->last_read;
    if (count_gap(self->gap_counts, gap) < 0) return NULL;
    self->gap_total += gap;
    self->body_bytes += end - start;
    self->last_read = now;
    PyObject *dropped = self->piece_before;
    self->piece_before = self->piece;
    self->piece = Py_NewRef(data);
    Py_XDECREF(dropped);
    if (write_on(self, data) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear();
        Py_CLEAR(self->transport);
    }
    Py_RETURN_NONE;
}

static PyObject *
not_implemented(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
    PyErr_SetNone(PyExc_NotImplementedError);
    return NULL;
}

static PyObject *
receive(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return not_implemented(self, NULL);
}

static PyObject *
taken(PyObject *object, PyObject *Py_UNUSED(none))
{
    SteadyStream *self = (SteadyStream *)object;
    PyObject *before = self->piece_before, *last = self->piece, *reads;
    if (before != NULL) reads = PyTuple_Pack(2, before, last);
    else if (last != NULL) reads = PyTuple_Pack(1, last);
    else reads = PyTuple_New(0);
    if (reads == NULL) return NULL;
    PyObject *result = Py_BuildValue("(dnN)", self->gap_total, self->body_bytes, reads);
    if (result == NULL) return NULL;
    self->gap_total = 0.0;
    self->body_bytes = 0;
    Py_CLEAR(self->piece);
    Py_CLEAR(self->piece_before);
    return result;
}

static int
init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"time", "gap_counts", NULL};
    SteadyStream *self = (SteadyStream *)object;
    PyObject *time, *gap_counts;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!", names, &time, &PyList_Type, &gap_counts)) return -1;
    Py_XSETREF(self->time, Py_NewRef(time));
    Py_XSETREF(self->gap_counts, Py_NewRef(gap_counts));
    self->descriptor = -1;
    return 0;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    SteadyStream *self = (SteadyStream *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->time);
    Py_VISIT(self->gap_counts);
    Py_VISIT(self->transport);
    return 0; /* the reads are bytes and refer to nothing */
}

static int
clear(PyObject *object)
{
    SteadyStream *self = (SteadyStream *)object;
    Py_CLEAR(self->time);
    Py_CLEAR(self->gap_counts);
    Py_CLEAR(self->transport);
    Py_CLEAR(self->piece);
    Py_CLEAR(self->piece_before);
    return 0;
}

static void
dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"data_received", data_received, METH_O, NULL},
    {"receive", (PyCFunction)(void (*)(void))receive, METH_FASTCALL, NULL},
    {"taken", taken, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"last_read", T_DOUBLE, offsetof(SteadyStream, last_read), 0, NULL},
    {"transport", T_OBJECT, offsetof(SteadyStream, transport), 0, NULL}, /* NULL reads as None */
    {"descriptor", T_INT, offsetof(SteadyStream, descriptor), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, init},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "gateway.relay._steady.SteadyStream",
    .basicsize = sizeof(SteadyStream),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

static PyObject *
feed_data_received(PyObject *object, PyObject *data)
{
    PyObject *receiver = ((Feed *)object)->receiver;
    if (receiver == NULL || receiver == Py_None) return PyObject_CallMethodNoArgs(object, unasked_name);
    Py_INCREF(receiver); /* it may be exchanged while it takes the data */
    PyObject *result = PyObject_CallMethodOneArg(receiver, data_received_name, data);
    Py_DECREF(receiver);
    return result;
}

static int
feed_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Feed *)object)->receiver);
    return 0;
}

static int
feed_clear(PyObject *object)
{
    Py_CLEAR(((Feed *)object)->receiver);
    return 0;
}

static void
feed_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    feed_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef feed_methods[] = {
    {"data_received", feed_data_received, METH_O, NULL},
    {"unasked", not_implemented, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef feed_members[] = {
    {"receiver", T_OBJECT, offsetof(Feed, receiver), 0, NULL}, /* NULL reads as None */
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot feed_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, feed_dealloc},
    {Py_tp_traverse, feed_traverse},
    {Py_tp_clear, feed_clear},
    {Py_tp_methods, feed_methods},
    {Py_tp_members, feed_members},
    {0, NULL},
};

static PyType_Spec feed_spec = {
    .name = "gateway.relay._steady.Feed",
    .basicsize = sizeof(Feed),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = feed_slots,
};

/* A constant of a Python module, or NULL with an exception. */
static PyObject *
constant(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    if (module == NULL) return NULL;
    PyObject *value = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    return value;
}

static int
load_mark(Mark *mark, const char *module_name, const char *name)
{
    PyObject *value = constant(module_name, name);
    if (value == NULL) return -1;
    char *bytes;
    int failed = PyBytes_AsStringAndSize(value, &bytes, &mark->size);
    if (!failed && mark->size > MARK_LIMIT) {
        PyErr_Format(PyExc_ImportError, "%s is too long", name);
        failed = -1;
    }
    if (!failed) memcpy(mark->bytes, bytes, (size_t)mark->size);
    Py_DECREF(value);
    return failed;
}

static int
load_gap_bounds(void)
{
    PyObject *value = constant("gateway.relay.accounting", "GAP_BOUNDS");
    if (value == NULL) return -1;
    PyObject *bounds = PySequence_Tuple(value);
    Py_DECREF(value);
    if (bounds == NULL) return -1;
    gap_bounds_size = PyTuple_GET_SIZE(bounds);
    if (gap_bounds_size > BOUNDS_LIMIT) PyErr_SetString(PyExc_ImportError, "GAP_BOUNDS is too long");
    for (Py_ssize_t at = 0; at < gap_bounds_size && !PyErr_Occurred(); at++)
        gap_bounds[at] = PyFloat_AsDouble(PyTuple_GET_ITEM(bounds, at));
    Py_DECREF(bounds);
    return PyErr_Occurred() ? -1 : 0;
}

static int
load_names(void)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&receive_name, "receive"},       {&write_name, "write"},
        {&is_closing_name, "is_closing"}, {&buffered_name, "get_write_buffer_size"},
        {&unasked_name, "unasked"},       {&data_received_name, "data_received"},
    };
    for (size_t at = 0; at < sizeof(names) / sizeof(names[0]); at++)
        if (*names[at].name == NULL && (*names[at].name = PyUnicode_InternFromString(names[at].text)) == NULL) return -1;
    return 0;
}

static int
add_type(PyObject *module, PyType_Spec *type_spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, type_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static int
exec(PyObject *module)
{
    if (load_gap_bounds() < 0) return -1;
    if (load_mark(&event_end, "gateway.relay.events", "EVENT_END") < 0) return -1;
    if (load_mark(&usage_key, "gateway.relay.accounting", "USAGE_KEY") < 0) return -1;
    if (load_names() < 0) return -1;
    return add_type(module, &spec) < 0 || add_type(module, &feed_spec) < 0 ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gateway.relay._steady",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__steady(void)
{
    return PyModuleDef_Init(&module);
}
