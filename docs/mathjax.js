// Formulas of the pages: MathJax is loaded on pages that have any. Without a network they are shown as LaTeX.
window.MathJax = {
  options: { ignoreHtmlClass: '.*', processHtmlClass: 'arithmatex' },
};
if (document.querySelector('.arithmatex')) {
  const script = document.createElement('script');
  script.src = 'https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-chtml.js';
  script.integrity = 'sha384-AHAnt9ZhGeHIrydA1Kp1L7FN+2UosbF7RQg6C+9Is/a7kDpQ1684C2iH2VWil6r4';
  script.crossOrigin = 'anonymous';
  script.async = true;
  document.head.appendChild(script);
}
