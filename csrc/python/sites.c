/* sites.c: which Python code is running, which handles outlive their ticks, and the rows of the map as
 * Python objects.
 *
 * A site is found by the code objects and instructions of the frames; lines and names are looked up
 * once, when it is new. PyFrame_GetBack and PyFrame_GetLasti are public but outside the stable ABI, so
 * they are looked up by name, as in scope.c.
 */
#include "py.h"

#include <dlfcn.h>

typedef struct frame *(*back_fn)(void *);
typedef int (*lasti_fn)(void *);
static back_fn frame_back;
static lasti_fn frame_lasti;

/* ---- Code objects ---------------------------------------------------------------------------- */

/* Those that were seen, each kept alive so that its address means it; with whether they are arena's
 * own, whose frames are left out. A program that makes code for ever fills the table; what it runs then
 * has no site. */
enum { CODES = 1 << 14 };
typedef struct code {
    PyObject *code;
    bool own;
} code;
static code *codes; /* twice as many places */
static uint32_t code_count;
static PyObject *own_folder; /* with the separator at its end */

static bool is_own(PyObject *of) {
    PyObject *file = PyObject_GetAttrString(of, "co_filename");
    bool own = file && own_folder && PyUnicode_Tailmatch(file, own_folder, 0, PY_SSIZE_T_MAX, -1) == 1;
    Py_XDECREF(file);
    return own;
}

/* The place of a code object in the table; NULL when there is no room for it. */
static const code *known_code(PyObject *of) {
    size_t at = ((uintptr_t)of >> 4) * 0x9E3779B9u;
    for (;; at++) {
        code *place = &codes[at % (2 * CODES)];
        if (place->code == of) return place;
        if (place->code) continue;
        if (code_count == CODES) return NULL;
        code_count++;
        *place = (code){Py_NewRef(of), is_own(of)};
        return place;
    }
}

/* ---- Sites ----------------------------------------------------------------------------------- */

static const char *text_of(PyObject *of, const char *name, PyObject **keep) {
    *keep = PyObject_GetAttrString(of, name);
    PyObject *bytes = *keep ? PyUnicode_AsEncodedString(*keep, "utf-8", "backslashreplace") : NULL;
    Py_XDECREF(*keep);
    *keep = bytes;
    char *text = NULL;
    if (!bytes || PyBytes_AsStringAndSize(bytes, &text, NULL) < 0) return "?";
    return text;
}

static uint32_t new_site(const uintptr_t *key, void *const *frames, uint32_t depth) {
    arena_frame told[ARENA__DEPTH];
    PyObject *files[ARENA__DEPTH], *functions[ARENA__DEPTH];
    for (uint32_t i = 0; i < depth; i++) {
        PyObject *of = (PyObject *)key[2 * i];
        told[i].file = text_of(of, "co_filename", &files[i]);
        told[i].function = text_of(of, "co_qualname", &functions[i]);
        told[i].line = PyFrame_GetLineNumber(frames[i]);
    }
    uint32_t number = arena__site_add(key, 2 * depth, told, depth);
    for (uint32_t i = 0; i < depth; i++) {
        Py_XDECREF(files[i]);
        Py_XDECREF(functions[i]);
    }
    return number;
}

/* The stack of the running code, `depth` frames of it; 0 when there is none. Runs no Python code: the
 * collector is held off, and an exception that is set stays set. With the GIL only. */
uint32_t arena_py_site(int depth) {
    uintptr_t key[2 * ARENA__DEPTH];
    void *frames[ARENA__DEPTH];
    uint32_t found = 0, number = 0;
    PyObject *type, *value, *traceback;
    if (depth <= 0 || !codes) return 0;
    int collects = PyGC_Disable();
    PyErr_Fetch(&type, &value, &traceback);
    void *frame = PyEval_GetFrame();
    Py_XINCREF((PyObject *)frame);
    while (frame && found < (uint32_t)depth) {
        PyObject *of = (PyObject *)PyFrame_GetCode(frame);
        uintptr_t lasti = (uintptr_t)frame_lasti(frame);
        const code *known = known_code(of);
        bool own = !known || known->own;
        if (!own) {
            key[2 * found] = (uintptr_t)of;
            key[2 * found + 1] = lasti;
            frames[found++] = Py_NewRef((PyObject *)frame);
        }
        Py_DECREF(of); /* the table keeps it */
        void *back = found < (uint32_t)depth ? (void *)frame_back(frame) : NULL;
        Py_DECREF((PyObject *)frame);
        frame = back;
    }
    Py_XDECREF((PyObject *)frame);
    if (found && !(number = arena__site_find(key, 2 * found))) number = new_site(key, frames, found);
    while (found) Py_DECREF((PyObject *)frames[--found]);
    PyErr_Restore(type, value, traceback); /* and not what failed in here: a site is then not known */
    if (collects) PyGC_Enable();
    return number;
}

/* For calls of the core that come from Python. */
static uint32_t site_outer(void) {
    if (arena_py_gil_held() != 1) return 0;
    int depth = arena_tracing();
    const arena_tick *tick = arena_current();
    if (tick && tick->depth > depth) depth = tick->depth;
    return arena_py_site(depth);
}

/* "f.py:3 in f, called from g.py:7 in g": a new reference, NULL for a site that is not known (without
 * an exception) or with one. */
static PyObject *site_text(uint32_t number) {
    const arena_frame *frames;
    uint32_t depth = arena__site_frames(number, &frames);
    PyObject *text = NULL;
    for (uint32_t i = 0; i < depth; i++) {
        PyObject *more = text ? PyUnicode_FromFormat("%U, called from %s:%d in %s", text, frames[i].file,
                                                     frames[i].line, frames[i].function)
                              : PyUnicode_FromFormat("%s:%d in %s", frames[i].file, frames[i].line,
                                                     frames[i].function);
        Py_XDECREF(text);
        if (!more) return NULL;
        text = more;
    }
    return text;
}

/* ---- Handles that outlive their ticks --------------------------------------------------------- */

/* While sites are recorded each handle has an entry. When its tick ends with the handle alive, it
 * waits: a loop's variable is bound anew in the next turn, and is no escape. What is still there when
 * WAIT more ticks have ended, or when somebody asks for the map, joins its row. */
#define WAIT 2
typedef struct entry {
    Handle *handle;
    uint32_t at, row;
    uint32_t next, prev; /* in the list of the scope, or of those that wait; of the free ones: next */
    size_t size;
    uint64_t ended; /* ticks that had ended when its own did */
    enum { FREE, OPEN, WAITING, PINNED, COUNTED } state; /* PINNED: a view holds it, and is in the map */
} entry;

static entry *entries; /* 0 is none */
static uint32_t entry_count, entry_room, free_entries;
static uint32_t waiting_first, waiting_last;
static uint64_t ended; /* ticks that recorded sites */

static uint32_t take_entry(void) {
    uint32_t number = free_entries;
    if (number) {
        free_entries = entries[number].next;
        return number;
    }
    if (entry_count + 1 >= entry_room) {
        uint32_t room = entry_room ? entry_room * 2 : 256;
        entry *more = PyMem_Realloc(entries, room * sizeof *more);
        if (!more) return 0;
        entries = more;
        entry_room = room;
    }
    return ++entry_count;
}

static void link_behind(uint32_t number, uint32_t *first, uint32_t *last) {
    entries[number].next = 0;
    entries[number].prev = *last;
    if (*last) entries[*last].next = number;
    *last = number;
    if (!*first) *first = number;
}

static void unlink_entry(uint32_t number, uint32_t *first, uint32_t *last) {
    entry *e = &entries[number];
    if (e->prev)
        entries[e->prev].next = e->next;
    else
        *first = e->next;
    if (e->next)
        entries[e->next].prev = e->prev;
    else if (last)
        *last = e->prev;
}

/* A handle of a tick that records sites. Without memory it has none. */
void arena_py_entry_new(Handle *handle) {
    uint32_t at = arena_py_site(handle->scope->tick.depth), number = take_entry();
    if (!number) return;
    uint32_t head = handle->scope->held;
    entries[number] = (entry){.handle = handle, .at = at, .next = head, .state = OPEN};
    if (head) entries[head].prev = number;
    handle->scope->held = number;
    handle->entry = number;
}

static void count_entry(uint32_t number) {
    entry *e = &entries[number];
    Handle *handle = e->handle;
    e->state = COUNTED;
    e->size = arena_py_span(handle).size;
    e->row = arena__row_add(ARENA_ESCAPE_STALE, e->at, &handle->scope->tick, e->size);
    arena_py_show(handle, e->row);
}

static void wait_for(uint32_t number) {
    entries[number].state = WAITING;
    entries[number].ended = ended;
    link_behind(number, &waiting_first, &waiting_last);
}

static void count_waiting(uint64_t until) {
    while (waiting_first && entries[waiting_first].ended <= until) {
        uint32_t number = waiting_first;
        unlink_entry(number, &waiting_first, &waiting_last);
        if (entries[number].handle->exports)
            entries[number].state = PINNED;
        else
            count_entry(number);
    }
}

/* Its last view has gone. */
void arena_py_entry_unpinned(Handle *handle) {
    if (entries[handle->entry].state == PINNED) wait_for(handle->entry);
}

/* The handle is freed. */
void arena_py_entry_gone(Handle *handle) {
    uint32_t number = handle->entry;
    entry *e = &entries[number];
    if (e->state == OPEN) unlink_entry(number, &handle->scope->held, NULL);
    if (e->state == WAITING) unlink_entry(number, &waiting_first, &waiting_last);
    if (e->state == COUNTED) arena__row_sub(e->row, e->size);
    *e = (entry){.next = free_entries, .state = FREE};
    free_entries = number;
}

/* A tick that records sites ends: its handles that are alive wait. */
void arena_py_entries_ended(Scope *scope) {
    ended++;
    while (scope->held) {
        uint32_t number = scope->held;
        unlink_entry(number, &scope->held, NULL);
        wait_for(number);
    }
    if (ended > WAIT) count_waiting(ended - WAIT);
}

/* A handle is used after its tick. */
void arena_py_note_use(Handle *handle) {
    Scope *scope = handle->scope;
    if (!arena__traced()) return;
    int depth = scope->tick.depth > arena_tracing() ? scope->tick.depth : arena_tracing();
    entry *e = handle->entry ? &entries[handle->entry] : NULL;
    uint32_t used = arena_py_site(depth);
    if (e && e->state == WAITING) {
        unlink_entry(handle->entry, &waiting_first, &waiting_last);
        count_entry(handle->entry);
    }
    uint32_t row = arena__row_use(e ? e->at : 0, used, &scope->tick);
    arena_py_show(handle, row);
}

/* Gives the row its example. Not of a secret: its repr would show some of it. */
void arena_py_show(Handle *handle, uint32_t row) {
    const arena_tick *tick = handle->scope ? &handle->scope->tick : arena_current();
    if (!arena__row_wants_example(row)) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = tick && tick->wipe ? PyUnicode_FromString("(of a tick that is wiped)")
                                        : arena_py_handle_repr((PyObject *)handle);
    Py_ssize_t size;
    const char *data = text ? PyUnicode_AsUTF8AndSize(text, &size) : NULL;
    if (data) arena__row_example(row, data, (size_t)size);
    Py_XDECREF(text);
    PyErr_Restore(type, value, traceback);
}

/* A Block or a Str that was just persisted, or NULL. */
void arena_py_show_persisted(PyObject *piece) {
    if (piece) arena_py_show((Handle *)piece, arena__persist_row(((Piece *)piece)->data));
}

/* "; it was allocated at ...; its tick began at ... and ended at ...", or "": a new reference. */
PyObject *arena_py_sites_of(Handle *handle) {
    const arena_tick *tick = &handle->scope->tick;
    PyObject *text = PyUnicode_FromString("");
    if (!tick->depth || !text) return text;
    const struct {
        const char *format;
        uint32_t at;
    } parts[] = {
        {"%U; it was allocated at %U", handle->entry ? entries[handle->entry].at : 0},
        {"%U; its tick began at %U", tick->begun},
        {"%U and ended at %U", tick->over},
    };
    for (size_t i = 0; text && i < sizeof parts / sizeof *parts; i++) {
        PyObject *place = site_text(parts[i].at);
        if (!place && PyErr_Occurred()) Py_CLEAR(text);
        if (!place) continue;
        PyObject *more = PyUnicode_FromFormat(parts[i].format, text, place);
        Py_DECREF(place);
        Py_DECREF(text);
        text = more;
    }
    return text;
}

/* ---- The map --------------------------------------------------------------------------------- */

static PyObject *text_object(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

static PyObject *site_object(const arena_frame *frames, size_t depth) {
    PyObject *site = PyTuple_New((Py_ssize_t)depth);
    for (size_t i = 0; site && i < depth; i++) {
        PyObject *file = text_object(frames[i].file), *function = text_object(frames[i].function);
        PyObject *line = PyLong_FromLong(frames[i].line);
        PyObject *one = file && function && line ? PyTuple_Pack(3, file, function, line) : NULL;
        Py_XDECREF(file);
        Py_XDECREF(function);
        Py_XDECREF(line);
        if (!one || PyTuple_SetItem(site, (Py_ssize_t)i, one) < 0) Py_CLEAR(site);
    }
    return site;
}

static PyObject *history_object(const arena_escape *row) {
    PyObject *history = PyList_New(0);
    for (size_t i = 0; history && i < row->points; i++) {
        PyObject *point = Py_BuildValue("(KK)", (unsigned long long)row->history[i].turn,
                                        (unsigned long long)row->history[i].low);
        if (!point || PyList_Append(history, point) < 0) Py_CLEAR(history);
        Py_XDECREF(point);
    }
    return history;
}

static int put(PyObject *dict, const char *key, PyObject *value) {
    int failed = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return failed;
}

static PyObject *row_object(const arena_escape *row) {
    PyObject *dict = PyDict_New();
    if (!dict) return NULL;
#define NUMBER(name) put(dict, #name, PyLong_FromUnsignedLongLong(row->name))
    if (put(dict, "kind", text_object(row->kind)) ||
        put(dict, "tick", row->tick ? text_object(row->tick) : Py_NewRef(Py_None)) ||
        put(dict, "site", site_object(row->site, row->site_depth)) ||
        put(dict, "used", site_object(row->used, row->used_depth)) || NUMBER(count) || NUMBER(bytes) ||
        NUMBER(count_ever) || NUMBER(bytes_ever) || NUMBER(uses) || NUMBER(first) || NUMBER(last) ||
        NUMBER(turn) || put(dict, "age", PyFloat_FromDouble(row->age)) ||
        put(dict, "example", text_object(row->example)) || put(dict, "history", history_object(row)))
        Py_CLEAR(dict);
#undef NUMBER
    return dict;
}

static void add_row(const arena_escape *row, void *arg) {
    PyObject *list = arg;
    if (PyErr_Occurred()) return;
    PyObject *dict = row_object(row);
    if (dict) (void)PyList_Append(list, dict);
    Py_XDECREF(dict);
}

PyObject *arena_py_rows(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    PyObject *list = PyList_New(0);
    if (!list) return NULL;
    count_waiting(UINT64_MAX);
    (void)arena_escapes(add_row, list);
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* A depth from an int: 0, or -1 with an exception. */
int arena_py_depth(PyObject *object, int *depth) {
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "trace is a number of frames from 0 to %d, not %R", ARENA__DEPTH,
                     object);
        return -1;
    }
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) PyErr_Clear();
    if (value < 0 || value > ARENA__DEPTH) {
        PyErr_Format(PyExc_ValueError, "trace is a number of frames from 0 to %d, not %R", ARENA__DEPTH,
                     object);
        return -1;
    }
    *depth = (int)value;
    return 0;
}

/* `folder`: where arena's own Python files are, whose frames nobody looks for. */
PyObject *arena_py_sites_setup(PyObject *unused, PyObject *folder) {
    (void)unused;
    void *back = dlsym(RTLD_DEFAULT, "PyFrame_GetBack"), *lasti = dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    memcpy(&frame_back, &back, sizeof back);
    memcpy(&frame_lasti, &lasti, sizeof lasti);
    if (!PyUnicode_Check(folder)) {
        PyErr_SetString(PyExc_TypeError, "_own_folder() takes a str");
        return NULL;
    }
    Py_XDECREF(own_folder);
    own_folder = Py_NewRef(folder);
    if (!codes && back && lasti && !(codes = PyMem_Calloc(2 * CODES, sizeof *codes)))
        return PyErr_NoMemory();
    arena__site_outer = site_outer;
    Py_RETURN_NONE;
}
