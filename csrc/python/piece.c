/* piece.c: Block and Str, the handles of a fixed size. */
#include "py.h"

PyTypeObject *arena_py_Block, *arena_py_Str;

/* A handle with `size` bytes in the scope (NULL: persisted), their content not yet set. */
static Piece *piece_new(PyTypeObject *type, Scope *scope, size_t size) {
    Piece *piece = PyObject_New(Piece, type);
    if (!piece) return NULL;
    Py_XINCREF((PyObject *)scope);
    piece->scope = scope;
    piece->exports = 0;
    piece->freed = false;
    piece->entry = 0;
    piece->size = size;
    piece->chunk = NULL;
    piece->data = scope ? arena__alloc_in(&scope->tick, size, &piece->chunk)
                        : arena__persist_new(size, false);
    if (ARENA__LIKELY(piece->data != NULL)) {
        if (ARENA__UNLIKELY(scope && scope->tick.depth)) arena_py_entry_new((Handle *)piece);
        return piece;
    }
    arena_py_raise(arena_error(), scope, size);
    Py_DECREF(piece);
    return NULL;
}

static PyObject *piece_from(PyTypeObject *type, Scope *scope, const char *data, size_t size) {
    Piece *piece = piece_new(type, scope, size);
    if (piece && size) arena__copy(piece->data, data, size);
    return (PyObject *)piece;
}

PyObject *arena_py_block_from(Scope *scope, const char *data, size_t size) {
    return piece_from(arena_py_Block, scope, data, size);
}

PyObject *arena_py_str_from(Scope *scope, const char *data, size_t size) {
    return piece_from(arena_py_Str, scope, data, size);
}

/* Reading the argument may have run code that ended the tick. */
static inline __attribute__((always_inline)) int still_open(Scope *scope) {
    if (!scope || (arena__state(&scope->tick) == ARENA__OPEN && arena_py_scope_mine(scope))) return 0;
    arena_py_raise_state(scope);
    return -1;
}

PyObject *arena_py_block_new(Scope *scope, PyObject *size) {
    size_t bytes;
    Py_XINCREF((PyObject *)scope);
    Piece *piece = NULL;
    if (arena_py_size(size, "the size of a block", &bytes) == 0 && still_open(scope) == 0)
        piece = piece_new(arena_py_Block, scope, bytes);
    if (piece && scope) arena__zero(piece->chunk, piece->data, bytes);
    if (piece && !scope) {
        memset(piece->data, 0, bytes);
        if (arena__traced()) arena_py_show_persisted((PyObject *)piece);
    }
    Py_XDECREF((PyObject *)scope);
    return (PyObject *)piece;
}

PyObject *arena_py_str_new(Scope *scope, PyObject *text, const char *what) {
    Source source;
    PyObject *str = NULL;
    Py_XINCREF((PyObject *)scope);
    if (arena_py_source(&source, text, what) == 0) {
        if (still_open(scope) == 0) str = arena_py_str_from(scope, source.data, source.size);
        arena_py_source_done(&source);
    }
    if (ARENA__UNLIKELY(!scope && arena__traced())) arena_py_show_persisted(str);
    Py_XDECREF((PyObject *)scope);
    return str;
}

/* The hash of the text, so that a Str finds what its str does; of the bytes when they are none. */
static Py_hash_t str_hash(PyObject *self) {
    PyObject *content = arena_py_handle_str(self);
    if (!content && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        content = arena_py_handle_bytes(self, NULL);
    }
    if (!content) return -1;
    Py_hash_t hash = PyObject_Hash(content);
    Py_DECREF(content);
    return hash;
}

static PyMethodDef piece_methods[] = {HANDLE_METHODS, {NULL, NULL, 0, NULL}};
static PyGetSetDef piece_getset[] = {HANDLE_GETSET, {NULL, NULL, NULL, NULL, NULL}};

#define PIECE_SLOTS                                                                               \
    {Py_tp_dealloc, arena_py_handle_dealloc}, {Py_tp_repr, arena_py_handle_repr},                 \
        {Py_tp_str, arena_py_handle_str}, {Py_tp_richcompare, arena_py_handle_compare},           \
        {Py_tp_methods, piece_methods}, {Py_tp_getset, piece_getset},                   \
        {Py_tp_iter, arena_py_handle_iter}, {Py_sq_item, arena_py_handle_byte},                   \
        {Py_sq_length, arena_py_handle_len},                                                      \
        {Py_sq_contains, arena_py_handle_contains}, {Py_mp_length, arena_py_handle_len},          \
        {Py_mp_subscript, arena_py_handle_item},                                                  \
        {Py_bf_getbuffer, arena_py_handle_get_buffer},                                            \
        {Py_bf_releasebuffer, arena_py_handle_release_buffer}

static PyType_Slot block_slots[] = {
    {Py_tp_doc,
     "Writable bytes of a fixed size, zeroed when made: tick.alloc(), arena.alloc_persist().\n\n"
     "Buffer protocol, b[i], b[i:j], b[i:j] = bytes of the same number, ==, len() in bytes."},
    PIECE_SLOTS,
    {Py_mp_ass_subscript, arena_py_handle_set_item},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {0, NULL},
};

static PyType_Slot str_slots[] = {
    {Py_tp_doc,
     "An immutable string, UTF-8 when made from a str: tick.strdup(), arena.strdup_persist().\n\n"
     "str(), bytes(), ==, in, buffer protocol (read-only); len() and indices in bytes."},
    PIECE_SLOTS,
    {Py_tp_hash, str_hash},
    {0, NULL},
};

PyType_Spec arena_py_block_spec = {
    .name = "arena.Block",
    .basicsize = sizeof(Piece),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = block_slots,
};

PyType_Spec arena_py_str_spec = {
    .name = "arena.Str",
    .basicsize = sizeof(Piece),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = str_slots,
};
