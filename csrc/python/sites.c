/* sites.c: which Python code is running, which handles outlive their ticks, and the rows of the map as
 * Python objects.
 *
 * A site is found by the code objects and instructions of the frames; their lines are looked up once,
 * and their names when the site is new. The frames are read by a walker of the objects module, which is compiled for
 * this version of CPython, else in the public way. PyFrame_GetBack, PyFrame_GetLasti and
 * PyCode_Addr2Line are public but outside the stable ABI, so they are looked up by name, as in scope.c.
 */
#include "py.h"

#include <dlfcn.h>

static PyObject *(*frame_back)(PyObject *);
static int (*frame_lasti)(PyObject *);
static int (*code_line)(PyObject *, int);
static uint32_t (*walker)(uintptr_t *key, uint32_t depth);

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
static PyObject *own_programs; /* in it, but code like anybody's: the command line's */

static bool is_own(PyObject *of) {
    PyObject *file = PyObject_GetAttrString(of, "co_filename");
    bool own = file && PyUnicode_Tailmatch(file, own_folder, 0, PY_SSIZE_T_MAX, -1) == 1 &&
               PyUnicode_Tailmatch(file, own_programs, 0, PY_SSIZE_T_MAX, -1) == 0;
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

/* Of code objects and lines: the instruction of a call is another one once CPython has specialized it. */
static uint32_t new_site(const uintptr_t *key, uint32_t depth) {
    arena_frame told[ARENA__DEPTH];
    PyObject *files[ARENA__DEPTH], *functions[ARENA__DEPTH];
    for (uint32_t i = 0; i < depth; i++) {
        PyObject *of = (PyObject *)key[2 * i];
        told[i].file = text_of(of, "co_filename", &files[i]);
        told[i].function = text_of(of, "co_qualname", &functions[i]);
        told[i].line = (int)key[2 * i + 1];
    }
    uint32_t number = arena__site_add(key, 2 * depth, told, depth);
    for (uint32_t i = 0; i < depth; i++) {
        Py_XDECREF(files[i]);
        Py_XDECREF(functions[i]);
    }
    return number;
}

/* What the walker does, in the public way. */
static uint32_t walk(uintptr_t *key, uint32_t depth) {
    uint32_t found = 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int collects = PyGC_Disable(); /* CPython 3.11 collects when it makes a frame object */
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && found < depth) {
        PyObject *of = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        key[2 * found] = (uintptr_t)of;
        key[2 * found + 1] = (uintptr_t)frame_lasti(frame);
        found++;
        Py_DECREF(of); /* the frame keeps it, and its caller the frame */
        PyObject *back = found < depth ? frame_back(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    if (collects) PyGC_Enable();
    PyErr_Restore(type, value, traceback); /* and not what failed in here: fewer frames are known */
    return found;
}

/* Frames beyond the depth that are looked at where some are arena's own. */
#define BEYOND 4
#define WORDS (2 * (ARENA__DEPTH + BEYOND))

/* What was found for frames as they are, by their hash: a site, or that own ones are among them. */
#define KNOWN_BITS 11
#define KNOWN (1 << KNOWN_BITS)
#define HAS_OWN UINT32_MAX
static struct known {
    uint32_t words, number, depth, beyond;
    uintptr_t key[WORDS];
} *known;

/* The frames without arena's own, in place. Returns how many; *kept is false when a code object among
 * all of them may go, and its address become another's. */
static uint32_t trim_own(uintptr_t *key, uint32_t frames, bool *kept) {
    uint32_t found = 0;
    *kept = true;
    for (uint32_t i = 0; i < frames; i++) {
        const code *of = known_code((PyObject *)key[2 * i]);
        if (!of) *kept = false;
        if (!of || of->own) continue;
        key[2 * found] = key[2 * i];
        key[2 * found + 1] = key[2 * i + 1];
        found++;
    }
    return found;
}

static ARENA__NOINLINE uint32_t find_site(const uintptr_t *key, uint32_t frames, uint32_t depth,
                                          uint32_t beyond, struct known *place) {
    bool more = !beyond && frames == depth; /* the stack may go on */
    uintptr_t trimmed[WORDS];
    bool kept;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    memcpy(trimmed, key, 2 * frames * sizeof *key);
    uint32_t found = trim_own(trimmed, frames, &kept), number = 0;
    if (more && found < frames) {
        number = HAS_OWN;
    } else if (found) {
        if (found > depth) found = depth;
        for (uint32_t i = 0; i < found; i++)
            trimmed[2 * i + 1] = (uintptr_t)code_line((PyObject *)trimmed[2 * i], (int)trimmed[2 * i + 1]);
        number = arena__site_find(trimmed, 2 * found);
        if (!number) number = new_site(trimmed, found);
    }
    PyErr_Restore(type, value, traceback);
    if (number && kept) {
        place->words = 2 * frames;
        place->depth = depth;
        place->beyond = beyond;
        place->number = number;
        memcpy(place->key, key, 2 * frames * sizeof *key);
    }
    return number;
}

static uint32_t look(uint32_t depth, uint32_t beyond) {
    uintptr_t key[WORDS], hash = depth;
    uint32_t frames = (walker ? walker : walk)(key, depth + beyond);
    if (!frames) return 0;
    for (uint32_t i = 0; i < 2 * frames; i += 2) /* the second product is not in the chain */
        hash = (hash ^ key[i] ^ key[i + 1] * 0xD6E8FEB86659FD93u) * 0x9E3779B97F4A7C15u;
    struct known *place = &known[hash >> (64 - KNOWN_BITS)]; /* all bits reach the highest ones */
    if (ARENA__LIKELY(place->words == 2 * frames && place->depth == depth && place->beyond == beyond &&
                      !memcmp(place->key, key, 2 * frames * sizeof *key)))
        return place->number;
    return find_site(key, frames, depth, beyond, place);
}

/* The stack of the running code, `depth` frames of it; 0 when it is not known. Runs no Python code, and
 * an exception that is set stays set. With the GIL only. */
uint32_t arena_py_site(int depth) {
    if (depth <= 0 || !known) return 0;
    uint32_t number = look((uint32_t)depth, 0);
    return ARENA__LIKELY(number != HAS_OWN) ? number : look((uint32_t)depth, BEYOND);
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

/* While sites are recorded each handle has an entry, in the list of its scope. When its tick ends with
 * the handle alive, it waits: a loop's variable is bound anew in the next turn, and is no escape. What
 * is still there when WAIT more ticks have ended, or when somebody asks for the map, joins its row. */
#define WAIT 2
typedef struct entry {
    Handle *handle;
    size_t size;         /* counted in the row */
    uint32_t next, prev; /* in the list of the scope; of those that nobody uses: next */
    uint32_t at, row;
    enum { LISTED, PINNED, COUNTED } state; /* PINNED: a view holds it, and is in the map itself */
} entry;

/* A table of a fixed size, for to grow it would be an allocation of the tick that grows it: 40 MB of
 * addresses, of which what is used becomes resident. Handles beyond it have no entry. 0 is none. */
enum { ENTRIES = 1 << 20 };
static entry *entries;
static uint32_t entry_count, free_entries;
static Scope *first_waiting, *last_waiting; /* by when they ended */
static uint64_t ended;                      /* ticks that recorded sites */

static void list_entry(uint32_t number) {
    entry *e = &entries[number];
    Scope *scope = e->handle->scope;
    e->state = LISTED;
    e->prev = 0;
    e->next = scope->held;
    if (e->next) entries[e->next].prev = number;
    scope->held = number;
}

static void unlist_entry(uint32_t number) {
    entry *e = &entries[number];
    if (e->prev)
        entries[e->prev].next = e->next;
    else
        e->handle->scope->held = e->next;
    if (e->next) entries[e->next].prev = e->prev;
}

/* A handle of a tick that records sites. */
void arena_py_entry_new(Handle *handle) {
    uint32_t at = arena_py_site(handle->scope->tick.depth), number = free_entries;
    if (number)
        free_entries = entries[number].next;
    else if (entries && entry_count + 1 < ENTRIES)
        number = ++entry_count;
    else
        return;
    handle->entry = number;
    entries[number].handle = handle;
    entries[number].at = at;
    list_entry(number);
}

/* The handle is freed. */
void arena_py_entry_gone(Handle *handle) {
    uint32_t number = handle->entry;
    entry *e = &entries[number];
    if (e->state == LISTED) unlist_entry(number);
    if (e->state == COUNTED) arena__row_sub(e->row, e->size);
    e->next = free_entries;
    free_entries = number;
}

static void count_entry(uint32_t number) {
    entry *e = &entries[number];
    Handle *handle = e->handle;
    unlist_entry(number);
    if (handle->exports) {
        e->state = PINNED;
        return;
    }
    e->state = COUNTED;
    e->size = arena_py_span(handle).size;
    e->row = arena__row_add(ARENA_ESCAPE_STALE, e->at, &handle->scope->tick, e->size);
    Py_INCREF((PyObject *)handle);
    arena_py_show(handle, e->row);
    Py_DECREF((PyObject *)handle);
}

/* Its last view has gone. */
void arena_py_entry_unpinned(Handle *handle) {
    if (entries[handle->entry].state != PINNED) return;
    list_entry(handle->entry);
    arena_py_wait(handle->scope);
}

/* The scope has ended with live handles, and waits. */
void arena_py_wait(Scope *scope) {
    if (scope->waits || !scope->held) return;
    scope->waits = true;
    scope->since = ended;
    scope->next_waiting = NULL;
    scope->prev_waiting = last_waiting;
    *(last_waiting ? &last_waiting->next_waiting : &first_waiting) = scope;
    last_waiting = scope;
}

void arena_py_wait_over(Scope *scope) {
    scope->waits = false;
    *(scope->prev_waiting ? &scope->prev_waiting->next_waiting : &first_waiting) = scope->next_waiting;
    *(scope->next_waiting ? &scope->next_waiting->prev_waiting : &last_waiting) = scope->prev_waiting;
}

static void count_waiting(uint64_t until) {
    while (first_waiting && first_waiting->since <= until) {
        Scope *scope = first_waiting;
        arena_py_wait_over(scope);
        Py_INCREF((PyObject *)scope);
        while (scope->held) count_entry(scope->held);
        Py_DECREF((PyObject *)scope);
    }
}

/* A tick that records sites has ended. */
void arena_py_entries_ended(Scope *scope) {
    ended++;
    arena_py_wait(scope);
    if (ended > WAIT) count_waiting(ended - WAIT);
}

/* A handle is used after its tick. */
void arena_py_note_use(Handle *handle) {
    Scope *scope = handle->scope;
    if (!arena__traced() && !scope->tick.depth) return;
    int depth = scope->tick.depth > arena_tracing() ? scope->tick.depth : arena_tracing();
    entry *e = handle->entry ? &entries[handle->entry] : NULL;
    uint32_t used = arena_py_site(depth);
    if (e && e->state == LISTED) count_entry(handle->entry);
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

static void look_up(const char *name, void *function) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    memcpy(function, &symbol, sizeof symbol);
}

/* _own_folder(folder, programs): where arena's own Python files are, whose frames nobody looks for, and
 * those in it that are programs like anybody's. */
PyObject *arena_py_sites_setup(PyObject *unused, PyObject *args) {
    (void)unused;
    PyObject *folder = PyTuple_Size(args) == 2 ? PyTuple_GetItem(args, 0) : NULL;
    PyObject *programs = folder ? PyTuple_GetItem(args, 1) : NULL;
    if (!folder || !PyUnicode_Check(folder) || !PyUnicode_Check(programs)) {
        PyErr_SetString(PyExc_TypeError, "_own_folder() takes two str");
        return NULL;
    }
    Py_XDECREF(own_folder);
    Py_XDECREF(own_programs);
    own_folder = Py_NewRef(folder);
    own_programs = Py_NewRef(programs);
    look_up("PyFrame_GetBack", &frame_back);
    look_up("PyFrame_GetLasti", &frame_lasti);
    look_up("PyCode_Addr2Line", &code_line);
    if (!known && frame_back && frame_lasti && code_line) {
        if (!codes) codes = PyMem_Calloc(2 * CODES, sizeof *codes);
        if (codes) known = PyMem_Calloc(KNOWN, sizeof *known);
        if (!known) return PyErr_NoMemory();
    }
    arena__site_outer = site_outer;
    Py_RETURN_NONE;
}

/* _sites_ready(): sites are about to be recorded. */
PyObject *arena_py_sites_ready(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    if (!entries && !(entries = arena__system.map(ENTRIES * sizeof *entries))) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* _walker(address): of a function that does what walk() does, faster. */
PyObject *arena_py_walker(PyObject *unused, PyObject *address) {
    (void)unused;
    void *function = PyLong_AsVoidPtr(address);
    if (!function && PyErr_Occurred()) return NULL;
    memcpy(&walker, &function, sizeof walker);
    Py_RETURN_NONE;
}
