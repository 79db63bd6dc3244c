"""Pages that change a run: pins (`--allow-pin`) and deletion (`--allow-delete`)."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from holdfast.cli.output import Answer
from holdfast.cli.pin import mark
from holdfast.cli.rm import Leave, rm
from holdfast.cli.web.pages import of_run, site_of
from holdfast.cli.web.site import given


async def pin(request: Request) -> Response:
    """Pin a checkpoint, or remove its pin."""
    site = site_of(request)
    run = site.run(request)
    listed = await site.checkpoint(request, run)
    is_pinned = request.state.form.get("pinned") == "yes"
    target = f"{run.root}@{listed.folder}"
    seen = await run.call(lambda: mark(target, pinned=is_pinned))
    run.changed()
    if seen.error is not None:
        raise HTTPException(409, str(seen.error))
    return RedirectResponse(site.rendering.url("r", run.name, "c", listed.folder), 303)


async def ask_delete(request: Request) -> Response:
    """Show what a deletion would do, and ask for the name and the reason."""
    site = site_of(request)
    run = site.run(request)
    listed = await site.checkpoint(request, run)
    common = await of_run(run, "checkpoints")
    leave = Leave(reason="", even_pinned=True, even_latest=True, dry_run=True, yes=False)
    target = f"{run.root}@{listed.folder}"
    seen = await run.call(lambda: rm(target, leave))
    values = {**given(seen), "listed": listed}
    return site.page(request, "delete.html", {**common, **values})


async def delete(request: Request) -> Response:
    """Delete a checkpoint whose name was typed, as `holdfast rm` does."""
    site = site_of(request)
    run = site.run(request)
    listed = await site.checkpoint(request, run)
    form = request.state.form
    if form.get("name", "").strip() != listed.folder:
        raise HTTPException(400, "Nothing was deleted: the typed name is not that of the folder.")
    leave = Leave(
        reason=form.get("reason", ""),
        even_pinned=form.get("even_pinned") == "yes",
        even_latest=form.get("even_latest") == "yes",
        dry_run=False,
        yes=True,
    )
    target = f"{run.root}@{listed.folder}"

    def work() -> Answer:
        try:
            return rm(target, leave)
        finally:
            run.changed()

    return site.begin(run, work, kind="rm", title=listed.folder, can_stop=False)
