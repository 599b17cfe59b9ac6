"""Our C++: compiled at first use (`build`), called through ctypes by the rooms that need it."""
