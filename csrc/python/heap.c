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

PyObject *arena_py_trim(PyObject *unused, PyObject *args, PyObject *kwargs) {
    (void)unused;
    if (!kwargs && PyTuple_Size(args) == 0 && idle()) return Py_NewRef(nothing);
    return PyObject_Call(arena_py_lent.trim, args, kwargs);
}

PyObject *arena_py_trim_run(PyObject *unused, PyObject *args) {
    (void)unused;
    unsigned long long keep, budget, predicted;
    if (!PyArg_ParseTuple(args, "KKK:_trim", &keep, &budget, &predicted)) return NULL;
    arena_trimmed done;
    Py_BEGIN_ALLOW_THREADS
    (void)arena_trim_all((size_t)keep, budget, predicted, &done);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KKKKKKKKiiii", (unsigned long long)done.run, (unsigned long long)done.before,
                         (unsigned long long)done.after, (unsigned long long)done.chunks,
                         (unsigned long long)done.kept, (unsigned long long)done.ns,
                         (unsigned long long)done.chunk_ns, (unsigned long long)done.heap_ns,
                         done.backend, done.heap, done.code, done.shared);
}
