/* noop.c: what the machine and the interpreter cost at least: objects that do nothing, bare copies.
 *
 * They use the whole C API and not the stable one: a limit has to be the lower of two.
 */
#include <Python.h>

typedef struct {
    PyObject_HEAD
    PyObject *token; /* of a Scope that was entered */
} noop;

static PyObject *var;
static PyTypeObject *noop_type, *scope_type;

static void drop(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(((noop *)self)->token);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *take(PyObject *self, PyObject *piece) {
    (void)self, (void)piece;
    Py_RETURN_NONE;
}

static PyObject *end(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *unused) {
    (void)unused;
    return Py_NewRef(self);
}

static PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    Py_RETURN_NONE;
}

static PyObject *scope_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    PyObject *token = PyContextVar_Set(var, self);
    if (!token) return NULL;
    Py_XSETREF(((noop *)self)->token, token);
    return Py_NewRef(self);
}

static PyObject *scope_leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)args, (void)count;
    PyObject *token = ((noop *)self)->token;
    if (!token) {
        PyErr_SetString(PyExc_RuntimeError, "not entered");
        return NULL;
    }
    int code = PyContextVar_Reset(var, token);
    Py_CLEAR(((noop *)self)->token);
    if (code != 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef noop_methods[] = {
    {"take", take, METH_O, "Does nothing with one argument."},
    {"end", end, METH_NOARGS, "Does nothing."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef scope_methods[] = {
    {"__enter__", scope_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))scope_leave, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot noop_slots[] = {
    {Py_tp_doc, "A context manager that does nothing."},
    {Py_tp_dealloc, drop},
    {Py_tp_methods, noop_methods},
    {0, NULL},
};

static PyType_Slot scope_slots[] = {
    {Py_tp_doc, "A context manager that sets and resets one context variable."},
    {Py_tp_dealloc, drop},
    {Py_tp_methods, scope_methods},
    {0, NULL},
};

static PyType_Spec noop_spec = {
    "benchmarks.noop.Noop", sizeof(noop), 0, Py_TPFLAGS_DEFAULT, noop_slots,
};

static PyType_Spec scope_spec = {
    "benchmarks.noop.Scope", sizeof(noop), 0, Py_TPFLAGS_DEFAULT, scope_slots,
};

static PyObject *make_of(PyTypeObject *type) {
    noop *self = PyObject_New(noop, type);
    if (self) self->token = NULL;
    return (PyObject *)self;
}

static PyObject *make(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return make_of(noop_type);
}

static PyObject *make_scope(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return make_of(scope_type);
}

/* Copies the bytes objects of a list behind one another into a buffer of at least their size. */
static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    Py_buffer target;
    if (count != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "gather(list of bytes, buffer)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE) != 0) return NULL;
    char *at = target.buf;
    Py_ssize_t left = target.len;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *piece = PyList_GET_ITEM(args[0], i);
        Py_ssize_t size = PyBytes_CheckExact(piece) ? PyBytes_GET_SIZE(piece) : -1;
        if (size < 0 || size > left) {
            PyErr_SetString(PyExc_ValueError, "a piece is not bytes, or does not fit");
            break;
        }
        memcpy(at, PyBytes_AS_STRING(piece), (size_t)size);
        at += size;
        left -= size;
    }
    PyBuffer_Release(&target);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* Zeroes a buffer. */
static PyObject *clear(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer target;
    if (PyObject_GetBuffer(object, &target, PyBUF_WRITABLE) != 0) return NULL;
    memset(target.buf, 0, (size_t)target.len);
    PyBuffer_Release(&target);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"clear", clear, METH_O, "Zero a buffer."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "Copy bytes into a buffer."},
    {"make", make, METH_NOARGS, "Return a new Noop."},
    {"make_scope", make_scope, METH_NOARGS, "Return a new Scope."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "noop", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_noop(void) {
    PyObject *module = PyModule_Create(&module_def);
    if (!module) return NULL;
    var = PyContextVar_New("noop", NULL);
    noop_type = (PyTypeObject *)PyType_FromSpec(&noop_spec);
    scope_type = (PyTypeObject *)PyType_FromSpec(&scope_spec);
    if (!var || !noop_type || !scope_type || PyModule_AddType(module, noop_type) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
