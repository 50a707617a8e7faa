"""The home of an agent program in a container."""

from pipeline.harness import HOME_DIR

# Caches of builds (`~/.m2`, `~/go`, `~/.cargo`) and git's configuration are in the task's home, and the agent's commands, which inherit the
# program's HOME, need them where there is no network.
MAKE_HOME = f"""mkdir -p {HOME_DIR} && for path in ~/* ~/.[!.]*; do
  name=${{path##*/}}
  [ ~ = / ] || [ ! -e "$path" ] || [ -e {HOME_DIR}/"$name" ] || ln -s "$path" {HOME_DIR}/"$name"
done"""
"""A command that makes the home, with links to everything in the task's own home. The program's files are written afterwards."""
