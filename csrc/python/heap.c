/* heap.c: trims, from Python.
 *
 * The core may walk the heap for hundreds of milliseconds, so the GIL is let go of: really, unlike in
 * what cffi generated, where these macros are others.
 */
#include "py.h"

static PyObject *nothing; /* the result of a trim with nothing to do */

PyObject *arena_py_trim_nothing(PyObject *unused, PyObject *result) {
    (void)unused;
    PyObject *old = nothing;
    nothing = Py_NewRef(result);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* Whether there is nothing that a trim could give back, now and without looking. */
static bool idle(void) {
    return arena_heap_kind() == ARENA_HEAP_NONE && nothing && !arena__cached() &&
           !arena_py_objects_connected();
}

PyObject *arena_py_trim_is_idle(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    return PyBool_FromLong(idle());
}

PyObject *arena_py_trim(PyObject *unused, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    (void)unused;
    if (count == 0 && !names && idle()) return Py_NewRef(nothing);
    PyObject *call = PyTuple_New(count), *result = NULL;
    PyObject *named = names ? PyDict_New() : NULL;
    if (!call || (names && !named)) goto done;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_SetItem(call, i, Py_NewRef(args[i])) < 0) goto done;
    for (Py_ssize_t i = 0; names && i < PyTuple_Size(names); i++)
        if (PyDict_SetItem(named, PyTuple_GetItem(names, i), args[count + i]) < 0) goto done;
    result = PyObject_Call(arena_py_lent.trim, call, named);
done:
    Py_XDECREF(call);
    Py_XDECREF(named);
    return result;
}

PyObject *arena_py_trim_run(PyObject *unused, PyObject *const *args, Py_ssize_t count) {
    (void)unused;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "_trim() takes keep, budget and predicted");
        return NULL;
    }
    unsigned long long numbers[3];
    for (Py_ssize_t i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (numbers[i] == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    }
    arena_trimmed done;
    Py_BEGIN_ALLOW_THREADS
    (void)arena_trim_all((size_t)numbers[0], numbers[1], numbers[2], &done);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KKKKKKKKiiii", (unsigned long long)done.run, (unsigned long long)done.before,
                         (unsigned long long)done.after, (unsigned long long)done.chunks,
                         (unsigned long long)done.kept, (unsigned long long)done.ns,
                         (unsigned long long)done.chunk_ns, (unsigned long long)done.heap_ns,
                         done.backend, done.heap, done.code, done.shared);
}
