"""One module a verb: it reads arguments, calls the library and shows what came of it."""
