"""Notes what belongs to one pytest session and decides which tests run and what becomes of them: hooks, options, objects."""
# pyright: basic, reportOptionalMemberAccess=false

from workers.grading.witness_plugin.parts import files_of, shadowed

PLAIN = (str, int, float, bool, type(None), list, tuple, dict, set)
# Options by which pytest selects tests, at any time after it has read its command line.
SELECTING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "maxfail", "collectonly")


class SessionParts:
    """The parts of a session at its start. `option` are the options of the command line alone."""

    def __init__(self, option):
        self.selecting = {name: _trait(getattr(option, name)) for name in SELECTING if hasattr(option, name)}
        self.options = {}
        self.settings = {}
        self.hooks = {}  # caller of each hook, and its entries with their functions
        self.objects = {}

    def note(self, config):
        """To be called once the session has started, when plugins have made of the options what they want."""
        manager = config.pluginmanager
        self.options = {name: _trait(value) for name, value in list(vars(config.option).items())}
        self.settings = {name: _trait(value) for name, value in _settings(config)}
        self.objects = _objects(config)
        for name, caller in list(vars(manager.hook).items()):
            if hasattr(caller, "get_hookimpls"):
                entries = [(entry, entry.function) for entry in caller.get_hookimpls()]
                self.hooks[name] = (caller, entries)

    def changed(self, config, session):
        """Name of each part that has become something else, and the files of what stands in for it."""
        option, manager = config.option, config.pluginmanager
        now = {name: _trait(value) for name, value in list(vars(option).items())}
        names = [name for name in self.selecting if now.get(name) != self.selecting[name]]
        names += [name for name in self.options if now.get(name) != self.options[name]]
        found = [("config.option." + name, ()) for name in names]
        settings = dict(_settings(config))
        names = [name for name in self.settings if _trait(settings.get(name)) != self.settings[name]]
        found += [("the setting " + name, ()) for name in names]
        objects = _objects(config)
        names = [name for name in objects if objects[name] is not self.objects.get(name)]
        found += [(name, files_of(objects[name])) for name in names]
        found += self._changed_hooks(manager)
        things = [config, manager, session, *(getattr(session, "items", None) or ())]
        for thing in things:
            found += shadowed(thing)
        return found

    def _changed_hooks(self, manager):
        found = []
        for name, (caller, entries) in self.hooks.items():
            now = getattr(manager.hook, name, None)
            if now is not caller:
                found.append((name, files_of(now)))
                continue
            there = {id(entry) for entry in now.get_hookimpls()}
            known = {id(entry) for entry, _ in entries}
            # A plugin that is switched off is registered as None.
            plugins = [plugin for plugin in manager.get_plugins() if plugin is not None]
            for entry in now.get_hookimpls():
                if id(entry) not in known and not any(entry.plugin is plugin for plugin in plugins):
                    found.append((name + " of nobody", files_of(entry.function)))
            for entry, function in entries:
                owner = _name_of(entry.plugin)
                if entry.function is not function:
                    found.append((name + " of " + owner, files_of(entry.function)))
                elif id(entry) not in there:
                    found.append((name + " of " + owner, ()))
        return found


def _objects(config):
    manager = config.pluginmanager
    found = {"config.hook": config.hook, "config.pluginmanager": manager, "config.option": config.option}
    for name in ("_inner_hookexec", "_hookexec", "hook"):
        if name in vars(manager):
            found["pluginmanager." + name] = vars(manager)[name]
    return found


def _settings(config):
    return list((getattr(config, "_inicache", None) or {}).items())


def _trait(value):
    """What of a value is compared: the content of a plain one, else which object it is."""
    return repr(value) if isinstance(value, PLAIN) else id(value)


def _name_of(plugin):
    return getattr(plugin, "__name__", None) or type(plugin).__name__
