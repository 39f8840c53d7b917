/* numpy.c: the data of NumPy's arrays, by its own allocator hook (NEP 49).
 *
 * NumPy's headers are not needed to build: two functions of its table and one structure, which are part
 * of its ABI since 1.22, are spelled out here.
 *
 * Which allocator is used is a context variable of NumPy's. A begin sets ours when another is set, and
 * no end takes it out: a task that was started inside of the tick has a copy of the context anyway, and
 * ticks that end in another order than they began could not tell what to put back. Where nothing is
 * captured it passes each request on to the allocator that was there before. An array keeps the
 * allocator that it was made with, so each one that we stand before has a handler of its own.
 */
#include "objects.h"

enum { GET_FEATURES = 211, SET_HANDLER = 304, GET_HANDLER = 305, SINCE_1_22 = 0x0f, PREVIOUS = 16 };

typedef struct data_allocator {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t each);
    void *(*realloc)(void *ctx, void *block, size_t size);
    void (*free)(void *ctx, void *block, size_t size);
} data_allocator;

typedef struct data_handler {
    char name[127];
    uint8_t version;
    data_allocator allocator;
} data_handler;

typedef PyObject *(*set_handler)(PyObject *capsule);
typedef PyObject *(*get_handler)(void);

static struct {
    bool known;
    set_handler set;
    get_handler get;
    struct {
        PyObject *before; /* a capsule */
        PyObject *capsule;
        data_allocator outside;
        data_handler handler;
    } mine[PREVIOUS];
    unsigned count;
} numpy;

static const char CAPSULE[] = "mem_handler";

/* NumPy calls these with the GIL, as it does with all that touches arrays; but nothing says that it
 * always will, so what is ours asks for it. */
static bool has_gil(void) {
    return PyGILState_Check();
}

static void *data_malloc(void *ctx, size_t size) {
    const data_allocator *outside = ctx;
    if (size > ARENA__SMALL && arena__self && has_gil()) {
        void *block = arena__captured_new(size, false);
        if (block) return block;
    }
    return outside->malloc(outside->ctx, size);
}

static void *data_calloc(void *ctx, size_t count, size_t each) {
    const data_allocator *outside = ctx;
    size_t size;
    if (arena__self && !__builtin_mul_overflow(count, each, &size) && size > ARENA__SMALL &&
        has_gil()) {
        void *block = arena__captured_new(size, true);
        if (block) return block;
    }
    return outside->calloc(outside->ctx, count, each);
}

static void *data_realloc(void *ctx, void *block, size_t size) {
    const data_allocator *outside = ctx;
    if (!block) return data_malloc(ctx, size);
    if (!arena__ours(block)) return outside->realloc(outside->ctx, block, size);
    bool had = has_gil();
    PyGILState_STATE gil = PyGILState_UNLOCKED;
    if (!had) gil = PyGILState_Ensure();
    void *moved = arena__ours_resize(block, size, outside->malloc, outside->ctx);
    if (!had) PyGILState_Release(gil);
    return moved;
}

static void data_free(void *ctx, void *block, size_t size) {
    const data_allocator *outside = ctx;
    if (!arena__ours(block)) {
        outside->free(outside->ctx, block, size);
    } else if (has_gil() || !Py_IsInitialized()) {
        arena__block_free(block);
    } else {
        PyGILState_STATE gil = PyGILState_Ensure();
        arena__block_free(block);
        PyGILState_Release(gil);
    }
}

/* The table of a NumPy that has been imported; NULL when there is none. */
static void **table(void) {
    static const char *const NAMES[] = {"numpy._core._multiarray_umath",
                                        "numpy.core._multiarray_umath"};
    static PyObject *names[2]; /* strings that are made once: this runs in each begin */
    PyObject *modules = PyImport_GetModuleDict();
    for (unsigned i = 0; i < 2; i++) {
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(NAMES[i]))) return NULL;
        PyObject *module = PyDict_GetItemWithError(modules, names[i]);
        if (!module || !PyModule_Check(module)) continue;
        PyObject *capsule = PyDict_GetItemString(PyModule_GetDict(module), "_ARRAY_API");
        if (capsule && PyCapsule_CheckExact(capsule)) return PyCapsule_GetPointer(capsule, NULL);
    }
    return NULL;
}

static bool find_numpy(void) {
    void **api = table();
    if (!api) return false;
    unsigned (*features)(void);
    memcpy(&features, &api[GET_FEATURES], sizeof features);
    if (features() < SINCE_1_22) return false;
    memcpy(&numpy.set, &api[SET_HANDLER], sizeof numpy.set);
    memcpy(&numpy.get, &api[GET_HANDLER], sizeof numpy.get);
    numpy.known = true;
    return true;
}

/* Our capsule in front of this one: borrowed, or NULL. It is ours already: itself. */
static PyObject *in_front_of(PyObject *capsule) {
    for (unsigned i = 0; i < numpy.count; i++)
        if (numpy.mine[i].before == capsule || numpy.mine[i].capsule == capsule)
            return numpy.mine[i].capsule;
    if (numpy.count == PREVIOUS) return NULL;
    const data_handler *before = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!before || before->version != 1) return NULL;
    unsigned i = numpy.count;
    numpy.mine[i].outside = before->allocator;
    data_handler *handler = &numpy.mine[i].handler;
    memcpy(handler->name, "arena", 6);
    handler->version = 1;
    handler->allocator = (data_allocator){&numpy.mine[i].outside, data_malloc, data_calloc,
                                          data_realloc, data_free};
    PyObject *mine = PyCapsule_New(handler, CAPSULE, NULL);
    if (!mine) return NULL;
    numpy.mine[i].before = Py_NewRef(capsule);
    numpy.mine[i].capsule = mine;
    numpy.count++;
    return mine;
}

static void put_in_front(void) {
    PyObject *now = numpy.get();
    if (!now) return;
    PyObject *mine = in_front_of(now);
    if (mine && mine != now) Py_XDECREF(numpy.set(mine));
    Py_DECREF(now);
}

/* From now on the data of arrays is captured too, in this context, if NumPy has been imported. What
 * fails here leaves NumPy as it was. */
void arena__numpy_begin(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (numpy.known || find_numpy()) put_in_front();
    PyErr_Restore(type, value, trace);
}
