/* Tell whether a module is as it was when it was read, in 6 ns a value. unchanged.py says what that is for.

   record(module, opaque, types)             -> a list of what the module contains, or None if it cannot be compared
   recall(module, record, template, opaque)  -> the template with objects for what stands for them; None if the module
                                                has changed

   One walk through the module's __dict__ and the dicts, lists, tuples and modules in it makes the record, or compares
   with it. Plain values are the same if they are the same object, which the record holds. To modules and callables it
   has weak references: it keeps none alive, and a new object at an old address is not the same. After each comes the
   version tag of its type. CPython gives a type another tag, which was never used before, when an attribute of the type
   or of a base is set: a forward replaced on a class shows, and another class of the object too.

   A tensor is recorded by its address, because PyTorch swaps no tensor that has weak references
   (torch.utils.swap_tensors). A new tensor at an old address is taken for the old one. So nothing else of a template may
   depend on a tensor, and the template's tensors are those that the walk has just met at these addresses.

   Values of other types could change inside: no record is made of a module with one, unless `opaque` is a set of types.
   Objects of these are then compared by identity, and the walk goes through the attributes of all others, once through
   each, so that modules may be in cycles. `types`, a set, gets the types of what it goes through: whether attributes are
   all that such objects have, the caller decides. No Python code runs during a walk. */

#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "another thread could change a dict during the walk"
#endif

enum { MOST_ITEMS = 5000 };            /* modules in a cycle, or that lead to the whole model, have more */
enum { MOST_VALUES = 4000000, DEEPEST = 1000 }; /* with `opaque`: some 30 ms, and 400 bytes each */
/* of a number in a record */
enum Kind { TAG = 1, DICT, LIST, TUPLE, SET, FROZEN, REFERENCE, SEEN, TENSOR, REAL, IMAGINARY };

typedef struct {
    PyObject *record;
    PyObject **next, **end; /* the items that are left to compare; NULL while the record is made */
    PyObject *opaque; /* NULL if there is none */
    PyObject *types, *seen; /* with `opaque`, while the record is made. seen: addresses of objects that were met */
    int depth;
} Walk;

static PyTypeObject *module_type, *tensor_type, *partial_type;
static PyObject *empty; /* stands for a dict, or OrderedDict, without items */

static int note(Walk *walk, PyObject *value) { /* Append to the record, or compare with its next item. */
    if (walk->next != NULL) return walk->next < walk->end && *walk->next++ == value;
    Py_ssize_t most = walk->opaque != NULL ? MOST_VALUES : MOST_ITEMS;
    return PyList_GET_SIZE(walk->record) < most && PyList_Append(walk->record, value) == 0;
}

static int note_number(Walk *walk, enum Kind kind, double number) { /* as a complex one, which no plain value is */
    if (walk->next != NULL) {
        PyObject *item = walk->next < walk->end ? *walk->next++ : Py_None;
        if (!PyComplex_CheckExact(item)) return 0;
        Py_complex found = ((PyComplexObject *)item)->cval;
        return found.real == kind && memcmp(&found.imag, &number, sizeof number) == 0; /* 0.0 is no -0.0 */
    }
    PyObject *item = PyComplex_FromDoubles(kind, number);
    int noted = item != NULL && note(walk, item);
    Py_XDECREF(item);
    return noted;
}

static PyObject *referent(PyObject *reference) { /* borrowed: only compared, or known to be alive */
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    if (PyWeakref_GetRef(reference, &object) > 0) Py_DECREF(object);
    return object;
#else
    return PyWeakref_GET_OBJECT(reference);
#endif
}

static int note_version(Walk *walk, PyTypeObject *type) {
    if (walk->next == NULL && type->tp_version_tag == 0)
        Py_XDECREF(PyObject_GetAttrString((PyObject *)type, "__init__")); /* sets it */
    return type->tp_version_tag != 0 && note_number(walk, TAG, type->tp_version_tag);
}

static int note_object(Walk *walk, PyObject *object) {
    int noted;
    if (walk->next != NULL) {
        PyObject *item = walk->next < walk->end ? *walk->next++ : Py_None;
        noted = PyWeakref_CheckRef(item) && referent(item) == object;
    } else {
        PyObject *item = PyWeakref_NewRef(object, NULL);
        noted = item != NULL && note(walk, item);
        Py_XDECREF(item);
    }
    return noted && note_version(walk, Py_TYPE(object));
}

static int note_tensor(Walk *walk, PyObject *tensor) {
    double address = (double)(uintptr_t)tensor;
    return (uintptr_t)address == (uintptr_t)tensor && note_number(walk, TENSOR, address) &&
           note_version(walk, Py_TYPE(tensor));
}

static int visit(Walk *walk, PyObject *value);

static inline int is_empty(PyObject *value) {
    return (PyDict_CheckExact(value) || PyODict_CheckExact(value)) && PyDict_GET_SIZE(value) == 0;
}

static inline int same_or_visit(Walk *walk, PyObject *value) { /* Most values are plain, or empty dicts. */
    if (walk->next < walk->end) {
        PyObject *item = *walk->next;
        if (item == value || (item == empty && is_empty(value)))
            return walk->next++ != NULL;
    }
    return visit(walk, value);
}

static int visit_items(Walk *walk, PyObject *container, enum Kind kind, Py_ssize_t length) {
    int noted = note_number(walk, kind, length);
    PyObject *key, *value;
    for (Py_ssize_t i = 0, position = 0; noted && i < length; i++) {
        if (kind != DICT) noted = same_or_visit(walk, PySequence_Fast_GET_ITEM(container, i));
        else if (PyDict_Next(container, &position, &key, &value))
            noted = same_or_visit(walk, key) && same_or_visit(walk, value);
    }
    return noted;
}

static int seen_before(Walk *walk, PyObject *object) { /* Note it, if so. */
    if (walk->opaque == NULL) return 0;
    if (walk->next != NULL) {
        PyObject *item = walk->next < walk->end ? *walk->next : Py_None;
        int seen = PyComplex_CheckExact(item) && ((PyComplexObject *)item)->cval.real == SEEN;
        walk->next += seen;
        return seen;
    }
    PyObject *address = PyLong_FromVoidPtr(object);
    int seen = address == NULL ? -1 : PySet_Contains(walk->seen, address);
    if (seen == 0) PySet_Add(walk->seen, address);
    Py_XDECREF(address);
    return seen != 0 && note_number(walk, SEEN, 0);
}

static int visit_attribute(Walk *walk, PyObject *value, const char *name) { /* one that C code gets */
    PyObject *attribute = PyObject_GetAttrString(value, name);
    int noted = attribute != NULL && visit(walk, attribute);
    Py_XDECREF(attribute);
    return noted;
}

static int visit_dict_of(Walk *walk, PyObject *value) {
    PyObject *dict = PyObject_GenericGetDict(value, NULL);
    int noted = dict != NULL && visit(walk, dict);
    Py_XDECREF(dict);
    return noted;
}

static int goes_through(Walk *walk, PyObject *value) { /* Tell the caller; 0 if it cannot be told. */
    return walk->next != NULL || walk->opaque == NULL || PySet_Add(walk->types, (PyObject *)Py_TYPE(value)) == 0;
}

static int visit_other(Walk *walk, PyObject *value) { /* an object of which only the type is known */
    int weak = PyType_SUPPORTS_WEAKREFS(Py_TYPE(value));
    if (PyWeakref_CheckRef(value)) {
        PyObject *object = referent(value); /* The record's reference to it may be this very one. */
        return note_number(walk, REFERENCE, 0) && visit(walk, object == NULL ? Py_None : object);
    }
    if (PyCFunction_Check(value) && PyCFunction_GET_SELF(value) != NULL && !PyModule_Check(PyCFunction_GET_SELF(value)))
        return note_object(walk, value) && visit(walk, PyCFunction_GET_SELF(value)); /* a method of an object */
    if (!weak && (PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value) || PyBytes_Check(value)))
        return note(walk, value); /* a plain value of a class of its own, as those of enumerations */
    if (PyType_Check(value)) return note_object(walk, value) && note_version(walk, (PyTypeObject *)value);
    if (PySet_Contains(walk->opaque, (PyObject *)Py_TYPE(value)) > 0 || PyFunction_Check(value) || PyCFunction_Check(value))
        return weak ? note_object(walk, value) : note(walk, value);
    if (PyMethod_Check(value)) /* a new object wherever it is bound */
        return visit(walk, PyMethod_GET_FUNCTION(value)) && visit(walk, PyMethod_GET_SELF(value));
    if (!goes_through(walk, value) || !weak || !note_object(walk, value)) return 0;
    if (seen_before(walk, value)) return 1;
    if (Py_TYPE(value) == partial_type)
        return visit_attribute(walk, value, "func") && visit_attribute(walk, value, "args") &&
               visit_attribute(walk, value, "keywords");
    return visit_dict_of(walk, value);
}

static int visit_list_of(Walk *walk, PyObject *items) { /* steals the list */
    int noted = items != NULL && visit(walk, items);
    Py_XDECREF(items);
    return noted;
}

static int visit_order(Walk *walk, PyObject *dict) { /* of an OrderedDict: not that of the dict that it is made of */
    PyObject *keys = PyODict_Type.tp_iter(dict);
    int noted = keys != NULL && visit_list_of(walk, PySequence_List(keys));
    Py_XDECREF(keys);
    return noted;
}

static int visit_derived(Walk *walk, PyObject *value) { /* what a container has in addition to its members */
    PyTypeObject *type = Py_TYPE(value);
    if (walk->opaque == NULL || type == &PyDict_Type || type == &PyTuple_Type || type == &PyList_Type) return 1;
    if (PyODict_Check(value) && PyDict_GET_SIZE(value) > 1 && !visit_order(walk, value)) return 0;
    if (PyODict_CheckExact(value)) return 1;
    return goes_through(walk, value) && note_version(walk, type) &&
           (type->tp_dictoffset == 0 || visit_dict_of(walk, value));
}

static int visit_value(Walk *walk, PyObject *value) {
    if (is_empty(value)) return note(walk, empty);
    if (PyDict_Check(value))
        return visit_derived(walk, value) && visit_items(walk, value, DICT, PyDict_GET_SIZE(value));
    if (PyTuple_Check(value) || PyList_Check(value))
        return visit_derived(walk, value) &&
               visit_items(walk, value, PyTuple_Check(value) ? TUPLE : LIST, PySequence_Fast_GET_SIZE(value));
    if (PyAnySet_Check(value)) {
        Py_ssize_t length = PySet_GET_SIZE(value); /* 0: as of every module's names of buffers that are not saved */
        return PyAnySet_CheckExact(value) && note_number(walk, PyFrozenSet_CheckExact(value) ? FROZEN : SET, length) &&
               (length == 0 || (walk->opaque != NULL && visit_list_of(walk, PySequence_List(value))));
    }
    if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
        PyUnicode_CheckExact(value))
        return note(walk, value);
    if (PyComplex_CheckExact(value))
        return note_number(walk, REAL, PyComplex_RealAsDouble(value)) &&
               note_number(walk, IMAGINARY, PyComplex_ImagAsDouble(value));
    if (!PyObject_TypeCheck(value, module_type)) {
        if (PyObject_TypeCheck(value, tensor_type)) return note_tensor(walk, value);
        return walk->opaque != NULL ? visit_other(walk, value) : PyCallable_Check(value) && note_object(walk, value);
    }
    if (!goes_through(walk, value) || !note_object(walk, value)) return 0;
    return seen_before(walk, value) || visit_dict_of(walk, value);
}

static int visit(Walk *walk, PyObject *value) {
    int noted = ++walk->depth < DEEPEST && visit_value(walk, value);
    walk->depth--;
    return noted;
}

static PyObject *record(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Walk walk = {PyList_New(0), NULL, NULL, args[1] == Py_None ? NULL : args[1], args[2], PySet_New(NULL), 0};
    int collects = PyGC_Disable(); /* it could run code that changes a dict */
    int noted = walk.record != NULL && walk.seen != NULL && visit(&walk, args[0]);
    if (collects) PyGC_Enable();
    Py_XDECREF(walk.seen);
    if (noted) return walk.record;
    Py_XDECREF(walk.record);
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyObject *filled(PyObject *part) { /* NULL if an object of a weak reference is gone */
    if (PyComplex_CheckExact(part)) /* a tensor's number: the walk has just met it */
        return Py_NewRef((PyObject *)(uintptr_t)((PyComplexObject *)part)->cval.imag);
    if (PyWeakref_CheckRef(part)) {
        PyObject *object = referent(part);
        return object == NULL || object == Py_None ? NULL : Py_NewRef(object);
    }
    if (!PyTuple_Check(part)) return Py_NewRef(part);
    PyObject *copy = Py_TYPE(part)->tp_alloc(Py_TYPE(part), PyTuple_GET_SIZE(part));
    for (Py_ssize_t i = 0; copy != NULL && i < PyTuple_GET_SIZE(part); i++) {
        PyObject *item = filled(PyTuple_GET_ITEM(part, i));
        if (item == NULL) Py_CLEAR(copy);
        else PyTuple_SET_ITEM(copy, i, item);
    }
    return copy;
}

static PyObject *recall(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject **items = PySequence_Fast_ITEMS(args[1]);
    Walk walk = {args[1], items, items + PyList_GET_SIZE(args[1]),
                 args[3] == Py_None ? NULL : args[3], NULL, NULL, 0};
    if (!visit(&walk, args[0]) || walk.next < walk.end) {
        PyErr_Clear(); /* of an attribute that is gone */
        Py_RETURN_NONE;
    }
    int collects = PyGC_Disable();
    PyObject *description = filled(args[2]);
    if (collects) PyGC_Enable();
    if (description == NULL && !PyErr_Occurred()) Py_RETURN_NONE; /* an object is gone: read again */
    return description;
}

static PyMethodDef functions[] = {
    {"record", (PyCFunction)(void (*)(void))record, METH_FASTCALL},
    {"recall", (PyCFunction)(void (*)(void))recall, METH_FASTCALL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "unchanged", NULL, -1, functions};

PyMODINIT_FUNC PyInit_unchanged(void) {
    PyObject *torch = PyImport_ImportModule("torch"), *nn = PyImport_ImportModule("torch.nn");
    PyObject *functools = PyImport_ImportModule("functools");
    if (torch == NULL || nn == NULL || functools == NULL) return NULL;
    partial_type = (PyTypeObject *)PyObject_GetAttrString(functools, "partial");
    module_type = (PyTypeObject *)PyObject_GetAttrString(nn, "Module");
    tensor_type = (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor");
    empty = PyList_New(0);
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntMacro(module, TENSOR) < 0) Py_CLEAR(module);
    return module;
}
