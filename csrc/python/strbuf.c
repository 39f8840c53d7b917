/* strbuf.c: the StrBuf type: a growing string, and the file-like sink that it is used as. */
#include "py.h"

PyTypeObject *arena_py_StrBuf;

static ARENA__NOINLINE void raise_fixed(StrBuf *self) {
    if (!arena_py_usable((Handle *)self))
        arena_py_raise_unusable((Handle *)self);
    else if (self->scope && arena__state(&self->scope->tick) == ARENA__ENDING)
        arena_py_raise(ARENA_E_ENDING, self->scope, 0);
    else
        PyErr_Format(PyExc_BufferError,
                     "this StrBuf has %zd live view(s) and cannot change size: release() them first",
                     self->exports);
}

static inline bool may_resize(const StrBuf *self) {
    const Scope *scope = self->scope;
    bool open = scope ? arena__state(&scope->tick) == ARENA__OPEN && arena_py_scope_mine(scope)
                      : !self->freed;
    if (ARENA__LIKELY(open && !self->exports)) return true;
    return scope && arena__state(&scope->tick) == ARENA__KEPT && !self->exports &&
           arena_py_use_kept((Handle *)(uintptr_t)self);
}

static ARENA__NOINLINE int raise_code(StrBuf *self, int code, size_t requested) {
    arena_py_raise(code, self->scope, requested);
    return -1;
}

/* The last step of every append: nothing below here runs Python code. */
static inline __attribute__((always_inline)) int append_bytes(StrBuf *self, const char *data,
                                                             size_t size) {
    if (ARENA__UNLIKELY(!may_resize(self))) {
        raise_fixed(self);
        return -1;
    }
    int code = arena__strbuf_append(&self->buf, data, size);
    return ARENA__LIKELY(code == ARENA_OK) ? 0 : raise_code(self, code, size);
}

static ARENA__NOINLINE int append_any(StrBuf *self, PyObject *piece, const char *what) {
    Source source;
    if (arena_py_source(&source, piece, what) < 0) return -1;
    int failed = append_bytes(self, source.data, source.size);
    arena_py_source_done(&source);
    return failed;
}

static inline int append_piece(StrBuf *self, PyObject *piece, const char *what) {
    if (ARENA__LIKELY(PyUnicode_CheckExact(piece) && PyUnicode_GetLength(piece) < ARENA_PY_SHORT_TEXT)) {
        Py_ssize_t size;
        const char *data = PyUnicode_AsUTF8AndSize(piece, &size);
        return ARENA__LIKELY(data != NULL) ? append_bytes(self, data, (size_t)size) : -1;
    }
    return append_any(self, piece, what);
}

PyObject *arena_py_strbuf_new(Scope *scope, PyObject *initial) {
    StrBuf *self = PyObject_New(StrBuf, arena_py_StrBuf);
    if (!self) return NULL;
    Py_XINCREF((PyObject *)scope);
    self->scope = scope;
    self->exports = 0;
    self->freed = false;
    self->entry = 0;
    arena__strbuf_init(&self->buf, scope ? &scope->tick : NULL);
    if (ARENA__UNLIKELY(scope ? scope->tick.depth != 0 : arena__traced())) {
        if (scope)
            arena_py_entry_new((Handle *)self);
        else
            self->buf.row = arena__escaped(ARENA_ESCAPE_PERSIST, 0);
    }
    if (initial && append_piece(self, initial, "strbuf()") < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (ARENA__UNLIKELY(self->buf.row)) arena_py_show((Handle *)self, self->buf.row);
    return (PyObject *)self;
}

static PyObject *strbuf_append(PyObject *self, PyObject *piece) {
    if (append_piece((StrBuf *)self, piece, "append()") < 0) return NULL;
    Py_RETURN_NONE;
}

/* The number of characters for a str and of bytes for the rest, as the io classes do. */
static PyObject *strbuf_write(PyObject *self, PyObject *piece) {
    /* What is returned is made first: nothing may fail once the piece is in. */
    if (PyUnicode_Check(piece)) {
        PyObject *length = PyLong_FromSsize_t(PyUnicode_GetLength(piece));
        if (length && append_piece((StrBuf *)self, piece, "write()") < 0) Py_CLEAR(length);
        return length;
    }
    Source source;
    if (arena_py_source(&source, piece, "write()") < 0) return NULL;
    PyObject *size = PyLong_FromSize_t(source.size);
    if (size && append_bytes((StrBuf *)self, source.data, source.size) < 0) Py_CLEAR(size);
    arena_py_source_done(&source);
    return size;
}

static PyObject *strbuf_inplace_add(PyObject *self, PyObject *piece) {
    if (append_piece((StrBuf *)self, piece, "+=") < 0) return NULL;
    Py_INCREF(self);
    return self;
}

/* The pieces of an iterable, one at a time. Lists and tuples are read by index: an iterator would
 * cost 10 ns a piece. */
typedef struct Pieces {
    PyObject *from; /* borrowed list or tuple, or an owned iterator */
    Py_ssize_t next;
    enum { LIST, TUPLE, ITERATOR } kind;
} Pieces;

static int pieces_open(Pieces *pieces, PyObject *iterable) {
    pieces->next = 0;
    pieces->kind = PyList_CheckExact(iterable) ? LIST
                   : PyTuple_CheckExact(iterable) ? TUPLE
                                                  : ITERATOR;
    pieces->from = pieces->kind == ITERATOR ? PyObject_GetIter(iterable) : iterable;
    return pieces->from ? 0 : -1;
}

/* A new reference; NULL at the end, or with an exception set. */
static inline PyObject *pieces_next(Pieces *pieces) {
    if (pieces->kind == ITERATOR) return PyIter_Next(pieces->from);
    bool list = pieces->kind == LIST;
    /* Asked each time: what a piece runs may change a list. */
    Py_ssize_t size = list ? PyList_Size(pieces->from) : PyTuple_Size(pieces->from);
    if (pieces->next >= size) return NULL;
    return Py_NewRef(list ? PyList_GetItem(pieces->from, pieces->next++)
                          : PyTuple_GetItem(pieces->from, pieces->next++));
}

static void pieces_close(Pieces *pieces) {
    if (pieces->kind == ITERATOR) Py_XDECREF(pieces->from);
}

/* Short pieces of a list or tuple, JOINED at a time through CPython's own join: five calls of the
 * limited API for each piece cost three times as much. What is not all ASCII goes piece by piece,
 * for its pieces may have their UTF-8 at hand. So does a long first piece: it would be copied twice.
 */
#define JOINED 256
#define JOIN_BELOW 512

/* What is between the pieces: nothing (data == NULL), and `text` when it is a str. */
typedef struct Separator {
    const char *data;
    size_t size;
    PyObject *text;
} Separator;
#define NO_SEPARATOR ((Separator){NULL, 0, NULL})

/* 1 when the next pieces were appended, 0 when they were not, -1 with an exception. */
static int append_joined(StrBuf *self, Pieces *pieces, const Separator *between, bool first) {
    static PyObject *nothing;
    if (!nothing && !(nothing = PyUnicode_FromStringAndSize("", 0))) return -1;
    bool list = pieces->kind == LIST;
    Py_ssize_t stop = pieces->next + JOINED, size = 0;
    PyObject *part = list ? PyList_GetSlice(pieces->from, pieces->next, stop)
                          : PyTuple_GetSlice(pieces->from, pieces->next, stop);
    if (!part) return -1;
    Py_ssize_t count = list ? PyList_Size(part) : PyTuple_Size(part);
    PyObject *head = !count ? NULL : list ? PyList_GetItem(part, 0) : PyTuple_GetItem(part, 0);
    PyObject *text = NULL;
    const char *data = NULL;
    if (head && PyUnicode_CheckExact(head) && PyUnicode_GetLength(head) < JOIN_BELOW)
        text = PyUnicode_Join(between->text ? between->text : nothing, part);
    if (text) data = PyUnicode_AsUTF8AndSize(text, &size);
    /* A piece that is no str, a surrogate, no memory for the join: the slow way finds out. */
    PyErr_Clear();
    int done = data && size == PyUnicode_GetLength(text);
    if (done && between->data && !first && append_bytes(self, between->data, between->size) < 0)
        done = -1;
    if (done == 1 && append_bytes(self, data, (size_t)size) < 0) done = -1;
    if (done == 1) pieces->next += count;
    Py_XDECREF(text);
    Py_DECREF(part);
    return done;
}

/* All pieces or none: a failure takes back those appended, unless the iterable itself has changed
 * the buffer meanwhile. */
static int append_all(StrBuf *self, PyObject *iterable, Separator between, const char *what) {
    Pieces pieces;
    if (arena_py_check((Handle *)self) < 0) return -1; /* also when there are no pieces */
    if (pieces_open(&pieces, iterable) < 0) return -1;
    size_t start = self->buf.len, expected = start;
    bool failed = false, first = true, foreign = false;
    bool joins = pieces.kind != ITERATOR && (!between.data || between.text);
    while (joins) {
        int done = append_joined(self, &pieces, &between, first);
        failed = done < 0;
        joins = done > 0;
        if (joins) first = false, expected = self->buf.len;
    }
    for (PyObject *piece; !failed && (piece = pieces_next(&pieces)) != NULL; first = false) {
        foreign |= self->buf.len != expected; /* by the iterable, or by another thread */
        expected = self->buf.len;
        if (between.data && !first) failed = append_bytes(self, between.data, between.size) < 0;
        if (!failed) {
            failed = append_piece(self, piece, what) < 0;
            if (!failed) expected = self->buf.len;
        }
        Py_DECREF(piece);
    }
    pieces_close(&pieces);
    if (!failed && PyErr_Occurred()) failed = true;
    if (failed && !foreign && may_resize(self) && self->buf.len >= expected) {
        size_t tail = self->buf.len - expected; /* a separator whose piece failed */
        if (self->buf.len > start && (tail == 0 || (between.data && tail == between.size)))
            (void)arena_strbuf_truncate(&self->buf, start);
    }
    return failed ? -1 : 0;
}

static bool is_one_piece(PyObject *object) {
    return PyUnicode_Check(object) || PyObject_CheckBuffer(object);
}

static PyObject *strbuf_extend(PyObject *self, PyObject *pieces) {
    int failed = is_one_piece(pieces) ? append_piece((StrBuf *)self, pieces, "extend()")
                                      : append_all((StrBuf *)self, pieces, NO_SEPARATOR, "extend()");
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *strbuf_writelines(PyObject *self, PyObject *pieces) {
    int failed = is_one_piece(pieces) ? append_piece((StrBuf *)self, pieces, "writelines()")
                                      : append_all((StrBuf *)self, pieces, NO_SEPARATOR, "writelines()");
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *strbuf_join(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "join(separator, pieces) takes 2 arguments (%zd given)",
                     count);
        return NULL;
    }
    if (is_one_piece(args[1])) {
        PyErr_SetString(PyExc_TypeError, "join(separator, pieces): pieces is an iterable of str or "
                                         "bytes-like objects, not one of them");
        return NULL;
    }
    /* A handle may move or end while the pieces are read: its bytes are copied first. */
    PyObject *separator = arena_py_is_handle(args[0]) ? arena_py_handle_bytes(args[0], NULL)
                                                      : Py_NewRef(args[0]);
    if (!separator) return NULL;
    Source source;
    int failed = arena_py_source(&source, separator, "join()");
    if (!failed) {
        Separator between = {source.data, source.size,
                             PyUnicode_Check(separator) ? separator : NULL};
        failed = append_all((StrBuf *)self, args[1], between, "join()");
        arena_py_source_done(&source);
    }
    Py_DECREF(separator);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static int resize_to(StrBuf *self, size_t size) {
    if (size == self->buf.len && arena_py_usable((Handle *)self)) return 0;
    if (!may_resize(self)) {
        raise_fixed(self);
        return -1;
    }
    int code = arena_strbuf_truncate(&self->buf, size);
    return code == ARENA_OK ? 0 : raise_code(self, code, 0);
}

/* Room is nobody's until it is used: it counts for no limit, and is not resident. */
static PyObject *strbuf_reserve(PyObject *self, PyObject *size) {
    StrBuf *buf = (StrBuf *)self;
    size_t bytes;
    if (arena_py_size(size, "the room to reserve", &bytes) < 0) return NULL;
    if (!may_resize(buf)) {
        raise_fixed(buf);
        return NULL;
    }
    int code = arena__strbuf_grow(&buf->buf, bytes);
    if (code != ARENA_OK && raise_code(buf, code, bytes) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *strbuf_clear(PyObject *self, PyObject *unused) {
    (void)unused;
    if (resize_to((StrBuf *)self, 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *strbuf_truncate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    StrBuf *buf = (StrBuf *)self;
    if (count > 1) {
        PyErr_Format(PyExc_TypeError, "truncate() takes at most 1 argument (%zd given)", count);
        return NULL;
    }
    size_t size;
    if (count && args[0] != Py_None) {
        if (arena_py_size(args[0], "the size to truncate to", &size) < 0) return NULL;
    } else {
        size = buf->buf.len;
    }
    PyObject *result = PyLong_FromSize_t(size); /* first: nothing may fail once it is cut */
    /* A larger size changes nothing, as in the io classes. */
    if (result && resize_to(buf, size < buf->buf.len ? size : buf->buf.len) < 0) Py_CLEAR(result);
    return result;
}

static PyObject *strbuf_tell(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_check((Handle *)self) < 0) return NULL;
    return PyLong_FromSize_t(((StrBuf *)self)->buf.len);
}

/* On a stale buffer the error is a ValueError too, as on a closed file: logging.shutdown() flushes
 * every handler at the exit and forgives just that. */
static PyObject *strbuf_flush(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_usable((Handle *)self)) Py_RETURN_NONE;
    arena_py_raise_unusable_as((Handle *)self, arena_py_lent.ClosedError);
    return NULL;
}

static PyObject *yes(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_check((Handle *)self) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *no(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_check((Handle *)self) < 0) return NULL;
    Py_RETURN_FALSE;
}

static PyObject *strbuf_getvalue(PyObject *self, PyObject *unused) {
    (void)unused;
    return arena_py_handle_str(self);
}

static PyObject *strbuf_getbuffer(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyMemoryView_FromObject(self);
}

static PyMethodDef strbuf_methods[] = {
    HANDLE_METHODS,
    {"append", strbuf_append, METH_O,
     "append($self, piece, /)\n--\n\n"
     "Add a str (as UTF-8), a bytes-like object or a handle (also this one) at the end. On any\n"
     "error the buffer is as it was: TypeError, UnicodeEncodeError for a lone surrogate,\n"
     "BufferError while a view lives, LimitError, MemoryError, StaleError, WrongThreadError.\n"
     "C: arena_strbuf_append."},
    {"write", strbuf_write, METH_O,
     "write($self, piece, /)\n--\n\n"
     "As append(), with its errors; returns the number of characters of a str, of bytes of anything\n"
     "else. C: arena_strbuf_append."},
    {"extend", strbuf_extend, METH_O,
     "extend($self, pieces, /)\n--\n\n"
     "append() each piece of an iterable, all or none; a str or a bytes-like object is one piece.\n"
     "An iterable that itself changes the buffer, or keeps a view of it, and then fails, leaves the\n"
     "pieces so far. Errors as append(). C: arena_strbuf_append."},
    {"writelines", strbuf_writelines, METH_O,
     "writelines($self, pieces, /)\n--\n\nThe same as extend(), with its errors."},
    {"join", (PyCFunction)(void (*)(void))strbuf_join, METH_FASTCALL,
     "join($self, separator, pieces, /)\n--\n\n"
     "append() each piece of an iterable with the separator between them, all or none as extend(),\n"
     "with its errors. C: arena_strbuf_append."},
    {"_reserve", strbuf_reserve, METH_O,
     "_reserve($self, size, /)\n--\n\nMake room for `size` more bytes, so that they come without a move."},
    {"clear", strbuf_clear, METH_NOARGS,
     "clear($self, /)\n--\n\n"
     "Empty the buffer; it keeps its room. Raises BufferError while a view lives, StaleError,\n"
     "WrongThreadError. C: arena_strbuf_clear."},
    {"truncate", (PyCFunction)(void (*)(void))strbuf_truncate, METH_FASTCALL,
     "truncate($self, size=None, /)\n--\n\n"
     "Cut to `size` bytes (None: where it is). A larger size changes nothing. Returns the size.\n"
     "Raises as clear(), and TypeError, ValueError for the size. C: arena_strbuf_truncate."},
    {"tell", strbuf_tell, METH_NOARGS,
     "tell($self, /)\n--\n\n"
     "The position in bytes: always the end. Raises StaleError, WrongThreadError.\n"
     "C: arena_strbuf_len."},
    {"flush", strbuf_flush, METH_NOARGS, "flush($self, /)\n--\n\n"
     "Do nothing, as in memory. On a stale buffer a StaleError that is a ValueError too."},
    {"writable", yes, METH_NOARGS, "writable($self, /)\n--\n\nTrue. Raises StaleError, WrongThreadError."},
    {"readable", no, METH_NOARGS, "readable($self, /)\n--\n\nFalse: read by str() or a view."},
    {"seekable", no, METH_NOARGS, "seekable($self, /)\n--\n\nFalse."},
    {"isatty", no, METH_NOARGS, "isatty($self, /)\n--\n\nFalse."},
    {"getvalue", strbuf_getvalue, METH_NOARGS,
     "getvalue($self, /)\n--\n\n"
     "The content as a str; for bytes: bytes(buf). Raises UnicodeDecodeError when it is not UTF-8,\n"
     "StaleError, WrongThreadError."},
    {"getbuffer", strbuf_getbuffer, METH_NOARGS,
     "getbuffer($self, /)\n--\n\n"
     "A writable view, the same as memoryview(buf). It pins the memory and fixes the size for as long\n"
     "as it or a slice of it lives. Raises StaleError, WrongThreadError."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef strbuf_getset[] = {
    HANDLE_GETSET,
    {"closed", arena_py_handle_stale, NULL, "True once the memory is gone, as `stale`.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot strbuf_slots[] = {
    {Py_tp_doc,
     "A growing string in UTF-8: tick.strbuf(), arena.strbuf_persist().\n\n"
     "A sink like io.StringIO, io.BytesIO and bytearray. It grows in the tick that made it. str(),\n"
     "bytes(), ==, in, buffer protocol (writable); len(), tell() and indices in bytes. While a view\n"
     "lives its size cannot change (BufferError)."},
    {Py_tp_dealloc, arena_py_handle_dealloc},
    {Py_tp_repr, arena_py_handle_repr},
    {Py_tp_str, arena_py_handle_str},
    {Py_tp_richcompare, arena_py_handle_compare},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_methods, strbuf_methods},
    {Py_tp_getset, strbuf_getset},
    {Py_nb_inplace_add, strbuf_inplace_add},
    {Py_tp_iter, arena_py_handle_iter},
    {Py_sq_item, arena_py_handle_byte},
    {Py_sq_length, arena_py_handle_len},
    {Py_sq_contains, arena_py_handle_contains},
    {Py_mp_length, arena_py_handle_len},
    {Py_mp_subscript, arena_py_handle_item},
    {Py_mp_ass_subscript, arena_py_handle_set_item},
    {Py_bf_getbuffer, arena_py_handle_get_buffer},
    {Py_bf_releasebuffer, arena_py_handle_release_buffer},
    {0, NULL},
};

PyType_Spec arena_py_strbuf_spec = {
    .name = "arena.StrBuf",
    .basicsize = sizeof(StrBuf),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = strbuf_slots,
};
