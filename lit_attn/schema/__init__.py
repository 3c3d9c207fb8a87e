"""Base classes of everything that can be written in YAML.

*Strict configuration* (`base.Config`): a frozen pydantic model. An unknown key, a number that is
not finite and a boolean in the place of a number are errors of one line (`errors`). Its identity
is the values that differ from the defaults, so an added key with a default changes no cell.

*Family* (`base.Kind`): interchangeable configurations that `kind` tells apart, for example the
optimisers. A member's class names its kind, declares its keys and defines the methods that the
family's base class declares as abstract: with those it builds what it describes. No other code
lists the members.

*Plug-in* (`plugins`): a Python file of a study (`parts: [mine.py]`), or an installed package with
an entry point in the group `lit_attn.parts`, that defines further members of any family.
"""
