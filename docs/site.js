// What scrolls sideways can be scrolled by keyboard, too. The theme makes such places itself, and may undo this.
const places = ".md-typeset pre > code, .md-typeset__scrollwrap";
const reach = each => { if (each.scrollWidth > each.clientWidth && each.tabIndex < 0) each.tabIndex = 0; };
const sizes = new ResizeObserver(changes => changes.forEach(change => reach(change.target)));
const look = () => document.querySelectorAll(places).forEach(each => { sizes.observe(each); reach(each); });
addEventListener("load", look);
new MutationObserver(look).observe(document.body, { childList: true, subtree: true, attributeFilter: ["tabindex"] });
