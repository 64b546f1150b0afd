"""Pages and figures of what was run: one way to draw, one template for all pages.

Here belongs whatever turns a folder that was written into something to look at: `drawing` (the style of every
figure and the files they become), `figures`, `grid_figures` and others (what is drawn, by name), `page` with
`templates/` (HTML), `run` and `comparison` (what stands on which page), `outside` (what no guarantee covers).
Nothing here computes a cost, trains or changes a folder beyond adding a page; pages of published experiments
are in `coterie.reproduce`.
"""
