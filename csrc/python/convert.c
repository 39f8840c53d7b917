/* convert.c: what a Python object has to offer as bytes, as a size, as a limit. */
#include "py.h"

/* CPython caches the UTF-8 of a non-ASCII str inside it, for as long as it lives. For a short str
 * that is the fast way; for a long one it would double what the caller keeps. */static int text_source(Source *source, PyObject *text) {
    static PyObject *isascii; /* made once: the name of a method costs more than its call */
    Py_ssize_t size;
    if (PyUnicode_GetLength(text) >= ARENA_PY_SHORT_TEXT) {
        if (!isascii && !(isascii = PyUnicode_InternFromString("isascii"))) return -1;
        /* That of str itself: a subclass could run code. */
        PyObject *ascii = PyObject_CallMethodObjArgs((PyObject *)&PyUnicode_Type, isascii, text, NULL);
        if (!ascii) return -1;
        bool is_ascii = ascii == Py_True;
        Py_DECREF(ascii);
        if (!is_ascii) {
            char *data;
            if (!(source->keep = PyUnicode_AsUTF8String(text))) return -1;
            if (PyBytes_AsStringAndSize(source->keep, &data, &size) < 0) return -1;
            source->data = data;
            source->size = (size_t)size;
            return 0;
        }
    }
    source->data = PyUnicode_AsUTF8AndSize(text, &size);
    source->size = (size_t)size;
    return source->data ? 0 : -1;
}

/* The bytes of a str (as UTF-8), a bytes-like object or a handle. May run Python code when the
 * object is neither; the bytes stay until arena_py_source_done. 0, or -1 with an exception that
 * names `what`. */
int arena_py_source(Source *source, PyObject *object, const char *what) {
    source->keep = NULL;
    source->has_view = false;
    if (PyUnicode_Check(object)) return text_source(source, object);
    if (PyBytes_CheckExact(object)) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(object, &data, &size) < 0) return -1;
        source->data = data;
        source->size = (size_t)size;
        return 0;
    }
    if (arena_py_is_handle(object)) {
        if (arena_py_check((Handle *)object) < 0) return -1;
        Span span = arena_py_span((Handle *)object);
        source->data = span.data;
        source->size = span.size;
        return 0;
    }
    if (!PyObject_CheckBuffer(object)) {
        PyObject *name = PyType_GetName(Py_TYPE(object));
        if (!name) return -1;
        PyErr_Format(PyExc_TypeError, "%s takes str or a bytes-like object, not %U%s", what, name,
                     PyLong_Check(object) ? " (for one byte: bytes([n]); for its digits: str(n))"
                                          : "");
        Py_DECREF(name);
        return -1;
    }
    if (PyObject_GetBuffer(object, &source->view, PyBUF_FULL_RO) < 0) return -1;
    source->has_view = true;
    source->data = source->view.buf;
    source->size = (size_t)source->view.len;
    if (!PyBuffer_IsContiguous(&source->view, 'C')) {
        PyObject *copy = PyBytes_FromObject(object);
        arena_py_source_done(source);
        if (!copy) return -1;
        char *data;
        Py_ssize_t size;
        source->keep = copy;
        if (PyBytes_AsStringAndSize(copy, &data, &size) < 0) return -1;
        source->data = data;
        source->size = (size_t)size;
    }
    return 0;
}

void arena_py_source_done(Source *source) {
    if (source->has_view) {
        source->has_view = false;
        PyBuffer_Release(&source->view);
    }
    Py_CLEAR(source->keep);
}

/* A size in bytes from an int. */
int arena_py_size(PyObject *object, const char *what, size_t *size) {
    PyObject *number = PyNumber_Index(object);
    if (!number) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyObject *name = PyType_GetName(Py_TYPE(object));
            if (!name) return -1;
            PyErr_Format(PyExc_TypeError, "%s is a whole number of bytes, not %U", what, name);
            Py_DECREF(name);
        }
        return -1;
    }
    Py_ssize_t value = PyLong_AsSsize_t(number);
    if (value == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%s is from 0 to %zd bytes, not %R", what,
                         PY_SSIZE_T_MAX, number);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    if (value < 0) {
        PyErr_Format(PyExc_ValueError, "%s is from 0 to %zd bytes, not %zd", what, PY_SSIZE_T_MAX,
                     value);
        return -1;
    }
    *size = (size_t)value;
    return 0;
}

static const struct {
    const char *unit;
    unsigned long long bytes;
} UNITS[] = {
    {"", 1},
    {"B", 1},
    {"kB", 1000ULL},
    {"KB", 1000ULL},
    {"MB", 1000ULL * 1000},
    {"GB", 1000ULL * 1000 * 1000},
    {"TB", 1000ULL * 1000 * 1000 * 1000},
    {"KiB", 1ULL << 10},
    {"MiB", 1ULL << 20},
    {"GiB", 1ULL << 30},
    {"TiB", 1ULL << 40},
};

/* "64 MiB": whole numbers only, so that what is meant is exact to the byte. */
static int text_size(PyObject *text, const char *what, size_t *bytes) {
    Py_ssize_t length;
    const char *at = PyUnicode_AsUTF8AndSize(text, &length);
    if (!at) { /* a lone surrogate is no size either, and gets the same answer */
        PyErr_Clear();
        at = "";
        length = 0;
    }
    const char *end = at + length;
    unsigned long long value = 0;
    bool digits = false, overflow = false;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        digits = true;
        overflow |= __builtin_mul_overflow(value, 10ULL, &value);
        overflow |= __builtin_add_overflow(value, (unsigned long long)(*at - '0'), &value);
    }
    if (at < end && *at == ' ') at++;
    for (size_t i = 0; digits && i < sizeof UNITS / sizeof *UNITS; i++) {
        size_t size = strlen(UNITS[i].unit);
        if ((size_t)(end - at) != size || memcmp(at, UNITS[i].unit, size) != 0) continue;
        overflow |= __builtin_mul_overflow(value, UNITS[i].bytes, &value);
        if (overflow || value > PY_SSIZE_T_MAX) break;
        *bytes = (size_t)value;
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s is a number of bytes such as 67108864 or \"64 MiB\" (B kB MB GB TB KiB "
                 "MiB GiB TiB), not %R",
                 what, text);
    return -1;
}

/* A size as users write it: an int, or text with a unit. */
static int any_size(PyObject *object, const char *what, size_t *bytes) {
    if (PyUnicode_Check(object)) return text_size(object, what, bytes);
    return arena_py_size(object, what, bytes);
}

int arena_py_limit(PyObject *object, size_t *limit) {
    *limit = ARENA__UNLIMITED;
    if (object == Py_None) return 0;
    if (PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "a limit is a number of bytes, or None for no limit, not %R",
                     object);
        return -1;
    }
    int failed = any_size(object, "a limit", limit);
    /* As good as none, and the core's arithmetic stays free of overflow. */
    if (!failed && *limit > ARENA__UNLIMITED) *limit = ARENA__UNLIMITED;
    return failed;
}

PyObject *arena_py_size_of(PyObject *unused, PyObject *const *args, Py_ssize_t count) {
    (void)unused;
    size_t bytes;
    const char *what = count == 2 ? PyUnicode_AsUTF8AndSize(args[1], NULL) : NULL;
    if (!what) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "_size() takes a value and its name");
        return NULL;
    }
    if (PyBool_Check(args[0])) {
        PyErr_Format(PyExc_TypeError, "%s is a number of bytes, such as 67108864 or \"64 MiB\", not %R",
                     what, args[0]);
        return NULL;
    }
    return any_size(args[0], what, &bytes) < 0 ? NULL : PyLong_FromSize_t(bytes);
}

/* The arguments of fn(name=None): the value is borrowed, NULL when it is not given. */
int arena_py_one_optional(const char *fn, const char *name, PyObject *const *args,
                          Py_ssize_t count, PyObject *names, PyObject **value) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    *value = NULL;
    if (count + named > 1) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most 1 argument (%zd given)", fn,
                     count + named);
        return -1;
    }
    if (named) {
        PyObject *key = PyTuple_GetItem(names, 0);
        if (PyUnicode_CompareWithASCIIString(key, name) != 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", fn, key);
            return -1;
        }
    }
    if (count + named == 1) *value = args[0];
    if (*value == Py_None) *value = NULL;
    return 0;
}
