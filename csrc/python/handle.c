/* handle.c: what Block, Str and StrBuf do alike: reading, views, comparing, persisting, freeing. */
#include "py.h"

bool arena_py_is_handle(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    return type == arena_py_StrBuf || type == arena_py_Str || type == arena_py_Block;
}

static bool is_strbuf(const void *handle) {
    return Py_TYPE((PyObject *)(uintptr_t)handle) == arena_py_StrBuf;
}

/* The content; valid while the handle is usable and nothing changes its size. */
Span arena_py_span(Handle *handle) {
    Span span;
    if (is_strbuf(handle)) {
        const arena_strbuf *buf = &((StrBuf *)handle)->buf;
        span = (Span){arena_strbuf_data(buf), buf->len};
    } else {
        span = (Span){((Piece *)handle)->data, ((Piece *)handle)->size};
    }
    return span;
}

static arena__chunk *chunk_of(Handle *handle) {
    return is_strbuf(handle) ? ((StrBuf *)handle)->buf.chunk : ((Piece *)handle)->chunk;
}

/* Frees persisted data; the size stays for messages. */
void arena_py_handle_free_data(Handle *handle) {
    if (is_strbuf(handle)) {
        arena_strbuf *buf = &((StrBuf *)handle)->buf;
        size_t size = buf->len;
        uint32_t row = buf->row;
        arena__strbuf_free(buf);
        if (ARENA__UNLIKELY(row)) arena__row_sub(row, 0);
        buf->len = size;
    } else {
        Piece *piece = (Piece *)handle;
        arena_free_persist(piece->data);
        piece->data = NULL;
    }
}

/* Persisted memory that was freed before has nothing left to free. */
static ARENA__NOINLINE void leave(Handle *handle) {
    if (handle->entry)
        arena_py_entry_gone(handle);
    else
        arena_py_handle_free_data(handle);
}

void arena_py_handle_dealloc(PyObject *self) {
    Handle *handle = (Handle *)self;
    PyTypeObject *type = Py_TYPE(self);
    Scope *scope = handle->scope;
    if (ARENA__UNLIKELY(!scope || handle->entry)) leave(handle);
    PyObject_Free(self);
    Py_DECREF(type);
    Py_XDECREF((PyObject *)scope);
}

static const char *kind_of(PyObject *self) {
    return is_strbuf(self) ? "StrBuf" : Py_TYPE(self) == arena_py_Str ? "Str" : "Block";
}

static PyObject *where(Handle *handle) {
    if (!handle->scope) return PyUnicode_FromString(handle->freed ? "freed" : "persisted");
    PyObject *which = arena_py_describe(handle->scope);
    if (!which || !arena__is_over(&handle->scope->tick)) return which;
    PyObject *text = PyUnicode_FromFormat("stale: %U has ended", which);
    Py_DECREF(which);
    return text;
}

#define SHOWN 60

/* Works for stale handles too, and from any thread; the content shows only where it may be read. */
PyObject *arena_py_handle_repr(PyObject *self) {
    Handle *handle = (Handle *)self;
    PyObject *place = where(handle), *text = NULL;
    if (!place) return NULL;
    Span span = arena_py_span(handle);
    /* To show what a tick had that an audit keeps is no use of it. */
    bool kept = handle->scope && arena__state(&handle->scope->tick) == ARENA__KEPT;
    if (!kept && !arena_py_usable(handle)) {
        text = PyUnicode_FromFormat("<arena.%s of %zu bytes, %U>", kind_of(self), span.size, place);
    } else {
        size_t shown = span.size < SHOWN ? span.size : SHOWN;
        PyObject *head = Py_TYPE(self) == arena_py_Block
                             ? PyBytes_FromStringAndSize(span.data, (Py_ssize_t)shown)
                             : PyUnicode_DecodeUTF8(span.data, (Py_ssize_t)shown, "replace");
        if (head)
            text = PyUnicode_FromFormat("<arena.%s %R%s of %zu bytes, %U>", kind_of(self), head,
                                        shown < span.size ? "..." : "", span.size, place);
        Py_XDECREF(head);
    }
    Py_DECREF(place);
    return text;
}

PyObject *arena_py_handle_str(PyObject *self) {
    if (arena_py_check((Handle *)self) < 0) return NULL;
    Span span = arena_py_span((Handle *)self);
    return PyUnicode_DecodeUTF8(span.data, (Py_ssize_t)span.size, "strict");
}

PyObject *arena_py_handle_bytes(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_check((Handle *)self) < 0) return NULL;
    Span span = arena_py_span((Handle *)self);
    return PyBytes_FromStringAndSize(span.data, (Py_ssize_t)span.size);
}

/* Of a stale StrBuf the error is a ValueError too: logging asks whether its stream is true before
 * it flushes it. See strbuf_flush. */
Py_ssize_t arena_py_handle_len(PyObject *self) {
    if (!arena_py_usable((Handle *)self)) {
        arena_py_raise_unusable_as((Handle *)self, is_strbuf(self) ? arena_py_lent.ClosedError
                                                                   : arena_py_lent.StaleError);
        return -1;
    }
    return (Py_ssize_t)arena_py_span((Handle *)self).size;
}

/* Equal to a str with the same UTF-8 and to anything with the same bytes. */
PyObject *arena_py_handle_compare(PyObject *self, PyObject *other, int op) {
    if (arena_py_check((Handle *)self) < 0) return NULL;
    if (op != Py_EQ && op != Py_NE) Py_RETURN_NOTIMPLEMENTED;
    if (!PyUnicode_Check(other) && !PyObject_CheckBuffer(other)) Py_RETURN_NOTIMPLEMENTED;
    Source source;
    if (arena_py_source(&source, other, "==") < 0) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return NULL;
        PyErr_Clear(); /* a lone surrogate: no UTF-8 is equal to it */
        return PyBool_FromLong(op == Py_NE);
    }
    /* Taking a view of a foreign object may have run code that ended the tick. */
    if (arena_py_check((Handle *)self) < 0) {
        arena_py_source_done(&source);
        return NULL;
    }
    Span span = arena_py_span((Handle *)self);
    bool equal = span.size == source.size && memcmp(span.data, source.data, span.size) == 0;
    arena_py_source_done(&source);
    return PyBool_FromLong(equal == (op == Py_EQ));
}

static void raise_no_number(const char *expected, PyObject *got) {
    PyObject *type = PyType_GetName(Py_TYPE(got));
    if (type) PyErr_Format(PyExc_TypeError, "%s, not %U", expected, type);
    Py_XDECREF(type);
}

static int byte_value(PyObject *value, char *byte) {
    if (!PyIndex_Check(value)) {
        raise_no_number("a byte is a whole number from 0 to 255", value);
        return -1;
    }
    PyObject *number = PyNumber_Index(value);
    long n = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    if (n == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
        PyErr_Clear();
    }
    if (n < 0 || n > 255) {
        PyErr_SetString(PyExc_ValueError, "a byte is from 0 to 255");
        return -1;
    }
    *byte = (char)(unsigned char)n;
    return 0;
}

int arena_py_handle_contains(PyObject *self, PyObject *what) {
    unsigned char byte;
    Source source = {.data = (char *)&byte, .size = 1};
    if (PyLong_Check(what)) {
        if (byte_value(what, (char *)&byte) < 0) return -1;
    } else if (arena_py_source(&source, what, "in") < 0) {
        return -1;
    }
    int found = arena_py_check((Handle *)self);
    if (found == 0) {
        Span span = arena_py_span((Handle *)self);
        found = !source.size || memmem(span.data, span.size, source.data, source.size) != NULL;
    }
    arena_py_source_done(&source);
    return found;
}

/* Where h[key] lies, or NULL with an exception. Asking the key may run Python code, so the handle
 * is checked after. */
static char *byte_at(Handle *handle, PyObject *key) {
    if (!PyIndex_Check(key)) {
        raise_no_number("an index is a whole number or a slice", key);
        return NULL;
    }
    Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if ((index == -1 && PyErr_Occurred()) || arena_py_check(handle) < 0) return NULL;
    Span span = arena_py_span(handle);
    if (index < 0) index += (Py_ssize_t)span.size;
    if (index >= 0 && index < (Py_ssize_t)span.size) return (char *)span.data + index;
    PyErr_Format(PyExc_IndexError, "index out of range: there are %zu bytes", span.size);
    return NULL;
}

/* The byte at an index that is not negative: for iteration, which ends at the IndexError. */
PyObject *arena_py_handle_byte(PyObject *self, Py_ssize_t index) {
    if (arena_py_check((Handle *)self) < 0) return NULL;
    Span span = arena_py_span((Handle *)self);
    if (index >= 0 && index < (Py_ssize_t)span.size)
        return PyLong_FromLong((unsigned char)span.data[index]);
    PyErr_Format(PyExc_IndexError, "index out of range: there are %zu bytes", span.size);
    return NULL;
}

/* Yields bytes as ints, as bytes and bytearray do. */
PyObject *arena_py_handle_iter(PyObject *self) {
    return arena_py_check((Handle *)self) < 0 ? NULL : PySeqIter_New(self);
}

/* h[i] is a byte as an int, h[a:b] a copy as bytes. */
PyObject *arena_py_handle_item(PyObject *self, PyObject *key) {
    Handle *handle = (Handle *)self;
    if (Py_TYPE(key) != &PySlice_Type) {
        const char *at = byte_at(handle, key);
        return at ? PyLong_FromLong((unsigned char)*at) : NULL;
    }
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(key, &start, &stop, &step) < 0 || arena_py_check(handle) < 0) return NULL;
    Span span = arena_py_span(handle);
    Py_ssize_t count = PySlice_AdjustIndices((Py_ssize_t)span.size, &start, &stop, step);
    if (step == 1) return PyBytes_FromStringAndSize(span.data + start, count);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count);
    char *out;
    Py_ssize_t size;
    if (!bytes || PyBytes_AsStringAndSize(bytes, &out, &size) < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) out[i] = span.data[start + i * step];
    return bytes;
}

/* h[i] = byte, h[a:b] = as many bytes: the size never changes, so views may live. */
int arena_py_handle_set_item(PyObject *self, PyObject *key, PyObject *value) {
    Handle *handle = (Handle *)self;
    if (!value) {
        PyErr_SetString(PyExc_TypeError,
                        "bytes of a handle cannot be deleted; a StrBuf is cut by truncate()");
        return -1;
    }
    if (Py_TYPE(key) != &PySlice_Type) {
        char byte;
        char *at = byte_value(value, &byte) < 0 ? NULL : byte_at(handle, key);
        if (!at) return -1;
        *at = byte;
        return 0;
    }
    Py_ssize_t start, stop, step;
    Source source;
    if (PySlice_Unpack(key, &start, &stop, &step) < 0) return -1;
    if (arena_py_source(&source, value, "a slice") < 0) return -1;
    int failed = arena_py_check(handle);
    if (!failed) {
        Span span = arena_py_span(handle);
        Py_ssize_t count = PySlice_AdjustIndices((Py_ssize_t)span.size, &start, &stop, step);
        if ((size_t)count != source.size) {
            PyErr_Format(PyExc_ValueError,
                         "a slice of %zd bytes takes %zd bytes, not %zu: a handle keeps its size",
                         count, count, source.size);
            failed = -1;
        } else if (step == 1) {
            memmove((char *)span.data + start, source.data, source.size);
        } else {
            /* Through a copy: the value may be this very handle. */
            char *copy = PyMem_Malloc(source.size ? source.size : 1);
            if (copy) {
                memcpy(copy, source.data, source.size);
                for (Py_ssize_t i = 0; i < count; i++)
                    ((char *)span.data)[start + i * step] = copy[i];
                PyMem_Free(copy);
            } else {
                PyErr_NoMemory();
                failed = -1;
            }
        }
    }
    arena_py_source_done(&source);
    return failed;
}

/* Each export counts; the first one pins the chunk, the last one lets it go. */
int arena_py_handle_get_buffer(PyObject *self, Py_buffer *view, int flags) {
    Handle *handle = (Handle *)self;
    view->obj = NULL;
    if (arena_py_check(handle) < 0) return -1;
    Span span = arena_py_span(handle);
    if (PyBuffer_FillInfo(view, self, (char *)span.data, (Py_ssize_t)span.size,
                          Py_TYPE(self) == arena_py_Str, flags) < 0)
        return -1;
    arena__chunk *chunk = chunk_of(handle);
    if (handle->exports++ == 0 && chunk) arena__pin(chunk);
    if (arena__traced() && chunk) {
        int depth = handle->scope->tick.depth;
        view->internal = arena__view_add(chunk, arena_py_site(depth ? depth : arena_tracing()));
    }
    return 0;
}

void arena_py_handle_release_buffer(PyObject *self, Py_buffer *view) {
    Handle *handle = (Handle *)self;
    arena__chunk *chunk = chunk_of(handle);
    if (ARENA__UNLIKELY(view->internal != NULL)) arena__view_gone(view->internal);
    if (--handle->exports) return;
    if (ARENA__UNLIKELY(handle->entry)) arena_py_entry_unpinned(handle);
    if (chunk) arena__unpin(chunk);
    if (handle->freed) arena_py_handle_free_data(handle);
}

PyObject *arena_py_handle_free(PyObject *self, PyObject *unused) {
    (void)unused;
    Handle *handle = (Handle *)self;
    if (arena_py_check(handle) < 0) return NULL;
    if (handle->scope) {
        PyObject *which = arena_py_describe(handle->scope);
        if (which)
            PyErr_Format(arena_py_lent.TickError,
                         "scratch is not freed by hand: this %s goes when %U ends", kind_of(self),
                         which);
        Py_XDECREF(which);
        return NULL;
    }
    if (handle->exports) {
        PyErr_Format(PyExc_BufferError, "this %s has %zd live view(s): release() them first",
                     kind_of(self), handle->exports);
        return NULL;
    }
    return arena_py_handle_discard(self, NULL);
}

PyObject *arena_py_handle_discard(PyObject *self, PyObject *unused) {
    (void)unused;
    Handle *handle = (Handle *)self;
    if (!handle->scope && !handle->freed) {
        handle->freed = true;
        if (!handle->exports) arena_py_handle_free_data(handle);
    }
    Py_RETURN_NONE;
}

PyObject *arena_py_handle_persist(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_check((Handle *)self) < 0) return NULL;
    if (is_strbuf(self)) return arena_py_strbuf_new(NULL, self);
    Span span = arena_py_span((Handle *)self);
    PyObject *copy = Py_TYPE(self) == arena_py_Block ? arena_py_block_from(NULL, span.data, span.size)
                                                     : arena_py_str_from(NULL, span.data, span.size);
    if (arena__traced()) arena_py_show_persisted(copy);
    return copy;
}

PyObject *arena_py_persist(PyObject *unused, PyObject *what) {
    (void)unused;
    if (arena_py_is_handle(what)) return arena_py_handle_persist(what, NULL);
    return arena_py_str_new(NULL, what, "persist()");
}

PyObject *arena_py_handle_reduce(PyObject *self, PyObject *protocol) {
    (void)protocol;
    const Handle *handle = (Handle *)self;
    bool gone = handle->scope ? arena__state(&handle->scope->tick) == ARENA__ENDED : handle->freed;
    if (handle->scope && arena__state(&handle->scope->tick) == ARENA__KEPT)
        arena_py_note_use((Handle *)self);
    /* Also in another thread the type is what is wrong: pools pickle in a thread of their own. */
    if (gone) {
        arena_py_raise_unusable((Handle *)self);
        return NULL;
    }
    PyErr_Format(PyExc_TypeError,
                 "a %s cannot be pickled or copied: take bytes(), or persist() for a copy that "
                 "outlives the tick",
                 kind_of(self));
    return NULL;
}

/* These three may be asked from any thread, and of a stale handle too. */
PyObject *arena_py_handle_stale(PyObject *self, void *unused) {
    (void)unused;
    const Handle *handle = (Handle *)self;
    return PyBool_FromLong(handle->scope ? arena__is_over(&handle->scope->tick)
                                         : handle->freed);
}

PyObject *arena_py_handle_persisted(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Handle *)self)->scope == NULL);
}

PyObject *arena_py_handle_nbytes(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(arena_py_span((Handle *)self).size);
}
