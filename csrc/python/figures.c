/* figures.c: what the C heap and Python's small-object arenas hold, for arena/reporting.py.
 *
 * The heap's figures wait for its locks, so the GIL is let go of: really, unlike in what cffi
 * generated, where these macros are others. Python's own arenas are guarded by the GIL, which is kept.
 */
#include "py.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static PyObject *figure(void *at) {
    const uint64_t *value = at;
    if (*value == ARENA__UNKNOWN) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(*value);
}

PyObject *arena_py_heap_figures(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    arena__figures now;
    bool sampled;
    Py_BEGIN_ALLOW_THREADS
    sampled = arena__heap_figures(&now);
    Py_END_ALLOW_THREADS
    if (!sampled) Py_RETURN_NONE;
    return Py_BuildValue("iNO&O&O&O&O&O&", now.backend, PyBool_FromLong(now.wraps), figure, &now.held,
                         figure, &now.used, figure, &now.free, figure, &now.top, figure, &now.mmapped,
                         figure, &now.pieces);
}

PyObject *arena_py_heap_count(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    uint64_t count;
    bool sampled;
    Py_BEGIN_ALLOW_THREADS
    sampled = arena__heap_count(&count);
    Py_END_ALLOW_THREADS
    if (!sampled) Py_RETURN_NONE;
    return PyLong_FromLongLong(count == ARENA__UNKNOWN ? -1 : (long long)count);
}

PyObject *arena_py_heap_set(PyObject *unused, PyObject *args) {
    (void)unused;
    int option, value;
    bool set;
    if (!PyArg_ParseTuple(args, "ii:_heap_set", &option, &value)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    set = arena__heap_set(option, value);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(set);
}

/* CPython tells of its arenas only in a text. Nothing of it is in the limited API, nor in a header. */
PyObject *arena_py_small_objects(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    int (*tell)(FILE *);
    *(void **)(void *)&tell = dlsym(RTLD_DEFAULT, "_PyObject_DebugMallocStats");
    if (!tell) return PyUnicode_FromString("");
    /* The text is in the C heap, so with the GIL held this must not meet a trim. */
    if (!arena__sample_begin()) Py_RETURN_NONE;
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    int failed = !file || (tell(file), fclose(file) != 0);
    arena__sample_end();
    PyObject *result = failed || !text ? PyErr_NoMemory()
                                       : PyUnicode_FromStringAndSize(text, (Py_ssize_t)size);
    free(text);
    return result;
}
